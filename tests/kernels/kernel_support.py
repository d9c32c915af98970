"""Inputs and error bounds that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer
from exl_core.ops.cache_rows import decode_rows, encode_rows, row_size
from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable

UNIT = 2.0**-24  # half a unit in the last place of float32: the error of one rounding


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng)


def strided_rows(rng: torch.Generator, rows: int, *rest: int) -> Tensor:
    """Random [rows, *rest] whose rows lie apart, as in a view into a fused projection."""
    width = int(torch.Size(rest).numel())
    return normal(rng, rows, width + 11)[:, 3 : 3 + width].view(rows, *rest)


def assert_within(got: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """Every value within its bound of the float64 answer; NaN is never within."""
    assert got.shape == exact.shape
    error = (got.double() - exact).abs()
    allowed = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    wrong = ~(error <= allowed)
    if wrong.any():
        worst = (error / allowed)[wrong].nan_to_num(nan=torch.inf).max()
        raise AssertionError(f"{int(wrong.sum())} values off, worst {float(worst):.3g} bounds")


def packed(table: OpTable, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    w = table.new_linear(*weight.shape, weight.dtype, bias is not None)
    table.fill_linear(w, 0, weight, bias)
    return w


@dataclass(frozen=True)
class PagedBatch:
    """Sequences of (past length, rows), their pages scattered over the cache."""

    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    row_starts: Tensor
    past_lens: Tensor
    rows: int

    def rows_of(self, cache: Tensor, seq: int, end: int) -> Tensor:
        """The first `end` positions of a sequence: float64 [kv_heads, end, d]."""
        return decode_rows(self.stored_rows_of(cache, seq, end))

    def stored_rows_of(self, cache: Tensor, seq: int, end: int) -> Tensor:
        """The same as they lie: [kv_heads, end, row]."""
        at, page_size = torch.arange(end), cache.shape[2]
        pages = self.page_table[seq].long()[at // page_size]
        rows = cache.view(torch.uint8)[pages, :, at % page_size]
        return rows.transpose(0, 1).contiguous().view(cache.dtype)

    @property
    def cache(self) -> CacheLayer:
        return CacheLayer(self.key_cache, self.value_cache)

    @property
    def attention_rows(self) -> AttentionRows:
        return AttentionRows(self.page_table, self.row_starts, self.past_lens)


def paged_batch(
    rng: torch.Generator,
    sequences: list[tuple[int, int]],
    *,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    value_dtype: torch.dtype | None = None,
) -> PagedBatch:
    """Pages are handed out in random order; whatever no sequence has written yet is NaN.

    `value_dtype`: of the value cache, where it differs from the key cache's.
    """
    counts = [-(-(past + rows) // page_size) for past, rows in sequences]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=rng).int()
    page_table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    caches = []
    for cache_type in (dtype, value_dtype or dtype):
        shape = (num_pages, kv_heads, page_size, row_size(cache_type, head_dim))
        # All ones is NaN in every type, and in the scales of codes.
        ones = torch.full((*shape[:3], shape[3] * cache_type.itemsize), 255, dtype=torch.uint8)
        caches.append(ones.view(cache_type))
    used = 0
    for seq, (past, rows) in enumerate(sequences):
        pages = order[used : used + counts[seq]]
        used += counts[seq]
        page_table[seq, : len(pages)] = pages
        at = torch.arange(past + rows)
        for cache in caches:
            fresh = encode_rows(normal(rng, past + rows, kv_heads, head_dim), cache.dtype)
            place = pages.long()[at // page_size], slice(None), at % page_size
            cache.view(torch.uint8)[place] = fresh.view(torch.uint8)
    starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0)
    return PagedBatch(
        *caches,
        page_table,
        starts.int(),
        torch.tensor([past for past, _ in sequences], dtype=torch.int32),
        int(starts[-1]),
    )
