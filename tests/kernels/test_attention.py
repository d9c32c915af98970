"""Paged attention: decode, prefill and both mixed, against float64 and against torch's own."""

from __future__ import annotations

import pytest
import torch
from kernel_support import UNIT, PagedBatch, assert_within, normal, paged_batch, strided_rows
from torch import Tensor

from exl_core.ops.attention import AttentionRows, Scoring
from exl_core.ops.table import OpTable
from support.profiles import first_by_default

MIXED = [(0, 1), (7, 1), (299, 1), (0, 37), (45, 70), (131, 2), (600, 1), (0, 9)]


def exact_attention(
    q: Tensor, batch: PagedBatch, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Float64 result through torch's own attention, and a bound on what float32 may do to it."""
    rows, heads, d = q.shape
    result = torch.empty(rows, heads, d, dtype=torch.float64)
    bound = torch.empty_like(result)
    starts = batch.row_starts.tolist()
    for seq, past in enumerate(batch.past_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        end = past + last - first
        keys = batch.rows_of(batch.key_cache, seq, end)
        values = batch.rows_of(batch.value_cache, seq, end)
        group = heads // keys.shape[0]
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        queries = q[first:last].double().transpose(0, 1)
        ages = torch.arange(past, end)[:, None] - torch.arange(end)
        seen = (ages >= 0) & ((ages < window) if window > 0 else torch.tensor(True))
        if softcap == 0.0:
            right = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scale
            )
            scores = queries @ keys.transpose(1, 2) * scale
        else:
            scores = queries @ keys.transpose(1, 2) * scale
            scores = softcap * torch.tanh(scores / softcap)
            right = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
        # A score is off by d + 3 roundings of its terms (and of itself, capped); that scales every
        # weight by e^error. The sums over keys add a rounding per key, exp a few.
        terms = queries.abs() @ keys.abs().transpose(1, 2) * scale
        score_error = ((d + 3) * UNIT * terms).amax(-1) + 4 * UNIT * scores.abs().amax(-1)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        relative = 2 * score_error + (2 * end + 16) * UNIT
        spread = weights @ values.abs()
        result[first:last] = right.transpose(0, 1)
        bound[first:last] = (relative[..., None] * spread).transpose(0, 1)
    return result.view(rows, heads * d), bound.view(rows, heads * d)


def run(
    table: OpTable, q: Tensor, batch: PagedBatch, *, window: int = 0, softcap: float = 0.0
) -> Tensor:
    scoring = Scoring(q.shape[2] ** -0.5, window, softcap)
    return table.paged_attention(q, batch.cache, batch.attention_rows, scoring)


def check(
    table: OpTable, q: Tensor, batch: PagedBatch, *, window: int = 0, softcap: float = 0.0
) -> None:
    y = run(table, q, batch, window=window, softcap=softcap)
    exact, bound = exact_attention(q, batch, q.shape[2] ** -0.5, window, softcap)
    assert y.dtype == torch.float32
    assert_within(y, exact, bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(9, 3, 64), (4, 1, 256), (2, 2, 72)])
def test_decode_and_prefill_mix_in_one_call(
    *, table: OpTable, rng, dtype, page_size, q_heads, kv_heads, d
) -> None:
    batch = paged_batch(rng, MIXED, kv_heads=kv_heads, head_dim=d, page_size=page_size, dtype=dtype)
    check(table, strided_rows(rng, batch.rows, q_heads, d), batch)


@pytest.mark.parametrize("d", [1, 8, 20, 37, 96, 120, 128, 512])
def test_any_head_dim_works(table: OpTable, rng, d) -> None:
    batch = paged_batch(
        rng, [(70, 1), (3, 21)], kv_heads=2, head_dim=d, page_size=16, dtype=torch.float16
    )
    check(table, strided_rows(rng, batch.rows, 4, d), batch)


# Smaller than a page, across pages, off the 64-key blocks by one, larger than any sequence.
@pytest.mark.parametrize("window", first_by_default([1, 63, 64, 200, 5, 16, 65, 10_000], 4))
@pytest.mark.parametrize("page_size", [16, 64])
def test_window_hides_older_keys(table: OpTable, rng, window, page_size) -> None:
    batch = paged_batch(
        rng, MIXED, kv_heads=1, head_dim=24, page_size=page_size, dtype=torch.float16
    )
    check(table, strided_rows(rng, batch.rows, 3, 24), batch, window=window)


@pytest.mark.parametrize("window", [0, 40])
def test_softcap_bends_scores_before_the_mask(table: OpTable, rng, window) -> None:
    batch = paged_batch(rng, MIXED, kv_heads=2, head_dim=32, page_size=32, dtype=torch.float32)
    q = 20 * strided_rows(rng, batch.rows, 4, 32)
    check(table, q, batch, window=window, softcap=15.0)


@pytest.mark.parametrize("rows", first_by_default([1, 2, 17, 65, 300, 5, 33, 64, 130], 5))
def test_every_chunk_length_matches(table: OpTable, rng, rows) -> None:
    """Both strategies and the limits between them: dot products, tiles, split keys."""
    batch = paged_batch(
        rng, [(1500, rows)], kv_heads=1, head_dim=16, page_size=64, dtype=torch.float16
    )
    check(table, normal(rng, rows, 2, 16), batch)


def test_sixteen_query_heads_share_one_kv_head(table: OpTable, rng) -> None:
    batch = paged_batch(rng, MIXED, kv_heads=1, head_dim=16, page_size=16, dtype=torch.float16)
    check(table, strided_rows(rng, batch.rows, 16, 16), batch)


def test_large_scores_do_not_overflow(table: OpTable, rng) -> None:
    batch = paged_batch(rng, MIXED, kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32)
    y = run(table, 1e4 * normal(rng, batch.rows, 2, 16), batch)
    assert y.isfinite().all()


@pytest.mark.parametrize(("past", "rows"), [(40, 1), (700, 1), (0, 60)])
def test_keys_outside_the_window_are_not_read(table: OpTable, rng, past, rows) -> None:
    """Pages before the window may belong to somebody else by now."""
    batch = paged_batch(
        rng, [(past, rows)], kv_heads=1, head_dim=16, page_size=16, dtype=torch.float16
    )
    q = normal(rng, rows, 2, 16)
    window = 21
    clean = run(table, q, batch, window=window)
    for position in range(max(0, past - window + 1)):
        page = int(batch.page_table[0, position // 16])
        for cache in (batch.key_cache, batch.value_cache):
            cache[page, :, position % 16] = torch.nan

    assert torch.equal(run(table, q, batch, window=window), clean)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
def test_a_nan_in_the_cache_is_not_hidden(table: OpTable, rng, rows, which) -> None:
    batch = paged_batch(
        rng, [(5, rows)], kv_heads=1, head_dim=16, page_size=16, dtype=torch.float16
    )
    getattr(batch, which)[int(batch.page_table[0, 0]), 0, 2, 3] = torch.nan

    y = run(table, normal(rng, rows, 2, 16), batch).view(rows, 2, 16)

    hit = y if which == "key_cache" else y[..., 3]
    assert hit.isnan().all()


@pytest.mark.parametrize("rows", [1, 20])
def test_a_score_of_minus_infinity_counts_as_nothing(table: OpTable, rng, rows) -> None:
    batch = paged_batch(
        rng, [(300, rows)], kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32
    )
    q = normal(rng, rows, 1, 16).abs()
    for position in range(130):  # whole blocks of keys, first in line
        page = int(batch.page_table[0, position // 16])
        batch.key_cache[page, :, position % 16] = -torch.inf

    y = run(table, q, batch)

    assert_within(y, run_without(batch, q, 130), 1e-4)


def run_without(batch: PagedBatch, q: Tensor, hidden: int) -> Tensor:
    """Float64 attention in which the first `hidden` positions do not exist."""
    rows, past = q.shape[0], int(batch.past_lens[0])
    keys = batch.rows_of(batch.key_cache, 0, past + rows)[0, hidden:]
    values = batch.rows_of(batch.value_cache, 0, past + rows)[0, hidden:]
    ages = torch.arange(past, past + rows)[:, None] - torch.arange(hidden, past + rows)
    return torch.nn.functional.scaled_dot_product_attention(
        q[:, 0].double(), keys, values, attn_mask=ages >= 0
    )


def test_a_sequence_does_not_depend_on_its_neighbours(kernels: OpTable, rng) -> None:
    """Bit for bit: the work is cut by each sequence's own shape."""
    batch = paged_batch(rng, MIXED, kv_heads=1, head_dim=16, page_size=16, dtype=torch.float16)
    q = normal(rng, batch.rows, 2, 16)
    together = run(kernels, q, batch)
    starts = batch.row_starts.tolist()

    for seq in range(len(MIXED)):
        rows = slice(starts[seq], starts[seq + 1])
        own = AttentionRows(
            batch.page_table[seq : seq + 1].contiguous(),
            torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            batch.past_lens[seq : seq + 1],
        )
        alone = kernels.paged_attention(q[rows].contiguous(), batch.cache, own, Scoring(0.25))
        assert torch.equal(alone, together[rows])
