"""Attention in chunks: a query attends to the keys of its own chunk of positions.

The keys of earlier chunks are whole pages. The rows of a chunk are therefore rows of a sequence of
their own, whose page table begins at the chunk's first page, and no op knows of chunks.

Dimensions: R rows, S sequences, P pages of a page table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE
from exl_core.errors import UnsupportedModelError
from exl_core.ops.attention import AttentionRows


def check_chunk(chunk: int) -> None:
    """Raises UnsupportedModelError for chunks that are not whole pages."""
    if chunk % PAGE_SIZE:
        raise UnsupportedModelError(
            "the model's attention has chunks of an unusual size",
            expected=f"a multiple of {PAGE_SIZE} tokens, which is a page of the cache",
            got=chunk,
        )


def in_chunks(rows: AttentionRows, positions: Tensor, chunk: int, page_size: int) -> AttentionRows:
    """The rows divided into sequences of one chunk each. positions int64 [R].

    Rows whose tensors are on a GPU are not read by the host. Each of them becomes a sequence,
    unless all are in the first chunk.
    """
    if rows.is_fresh and len(positions) <= chunk:
        return rows
    if rows.past_lens.device.type != "cpu":
        return one_by_one(rows, positions, chunk, page_size)
    pages = rows.page_table.shape[1]
    starts, pasts, tables = [0], [], []
    firsts = rows.row_starts.tolist()
    for seq, past in enumerate(rows.past_lens.tolist()):
        end = past + firsts[seq + 1] - firsts[seq]
        position = past
        while position < end:
            first = position // chunk * chunk
            last = min(first + chunk, end)
            starts.append(starts[-1] + last - position)
            pasts.append(position - first)
            own = rows.page_table[seq, first // page_size :]
            tables.append(torch.nn.functional.pad(own, (0, pages - len(own))))
            position = last
    return AttentionRows(
        torch.stack(tables),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(pasts, dtype=torch.int32),
    )


def one_by_one(rows: AttentionRows, positions: Tensor, chunk: int, page_size: int) -> AttentionRows:
    """The same, with each row as a sequence, on the device of the rows.

    Rows after those of the last sequence, which pad a captured pass, get its pages.
    """
    count, (seqs, pages) = len(positions), rows.page_table.shape
    index = torch.arange(count, dtype=torch.int32, device=positions.device)
    seq = torch.searchsorted(rows.row_starts[1:], index, right=True).clamp(max=seqs - 1)  # [R]
    skipped = positions // chunk * (chunk // page_size)  # pages, [R]
    columns = (torch.arange(pages, device=positions.device) + skipped[:, None]).clamp(max=pages - 1)
    starts = torch.arange(count + 1, dtype=torch.int32, device=positions.device)
    past = (positions % chunk).to(torch.int32)
    return AttentionRows(rows.page_table[seq].gather(1, columns), starts, past)
