"""Attention in chunks: rows as sequences of one chunk each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exl_core.model.chunks import in_chunks, one_by_one
from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.backends.reference.attention import ReferenceAttentionOps

CHUNK, PAGE_SIZE, HEAD_DIM = 8, 4, 16
PASTS, COUNTS = (0, 5, 17, 23), (3, 14, 1, 2)  # within a chunk, over two borders, at its end
Divide = Callable[[AttentionRows, Tensor, int, int], AttentionRows]


@pytest.mark.parametrize("divide", [in_chunks, one_by_one])
def test_a_row_attends_to_the_keys_of_its_chunk(divide: Divide) -> None:
    rng = torch.Generator().manual_seed(2)
    pages = torch.randperm(4 * 7, generator=rng).view(4, 7).to(torch.int32)
    starts = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0)], dtype=torch.int32)
    rows = AttentionRows(pages, starts, torch.tensor(PASTS, dtype=torch.int32))
    spans = [range(past, past + count) for past, count in zip(PASTS, COUNTS, strict=True)]
    positions = torch.tensor([position for span in spans for position in span])
    keys, values = torch.randn(2, pages.numel(), 1, PAGE_SIZE, HEAD_DIM, generator=rng)
    q = torch.randn(len(positions), 1, HEAD_DIM, generator=rng)

    divided = divide(rows, positions, CHUNK, PAGE_SIZE)
    found = ReferenceAttentionOps.paged_attention(
        q, CacheLayer(keys, values), divided, Scoring(HEAD_DIM**-0.5)
    )

    row = 0
    for seq, span in enumerate(spans):
        own_keys, own_values = (part[pages[seq]].reshape(-1, HEAD_DIM) for part in (keys, values))
        for position in span:
            seen = slice(position // CHUNK * CHUNK, position + 1)
            shares = (own_keys[seen] @ q[row, 0] * HEAD_DIM**-0.5).softmax(0)
            torch.testing.assert_close(found[row], shares @ own_values[seen])
            row += 1


@pytest.mark.parametrize("rows", [CHUNK, CHUNK + 1])
def test_the_beginning_of_a_sequence_within_one_chunk_is_not_divided(rows: int) -> None:
    pages = torch.arange(7, dtype=torch.int32)[None]
    starts, pasts = (torch.tensor(x, dtype=torch.int32) for x in ([0, rows], [0]))
    fresh = AttentionRows(pages, starts, pasts, is_fresh=True)
    found = in_chunks(fresh, torch.arange(rows), CHUNK, PAGE_SIZE)
    assert (found is fresh) == (rows <= CHUNK)
    assert found.row_starts.tolist() == ([0, rows] if rows <= CHUNK else [0, CHUNK, rows])


def test_rows_that_pad_a_captured_pass_stay_within_the_page_table() -> None:
    pages = torch.arange(6, dtype=torch.int32).view(2, 3)
    starts, pasts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1], [9, 0]))
    rows = one_by_one(AttentionRows(pages, starts, pasts), torch.tensor([9, 0, 0]), 8, PAGE_SIZE)
    assert rows.page_table.tolist() == [[2, 2, 2], [3, 4, 5], [3, 4, 5]]
    assert rows.past_lens.tolist() == [1, 0, 0]
    assert rows.row_starts.tolist() == [0, 1, 2, 3]
