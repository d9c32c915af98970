"""Inputs and error bounds that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.ops.table import OpTable, PackedLinear

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
        at, page_size = torch.arange(end), cache.shape[2]
        pages = self.page_table[seq].long()[at // page_size]
        return cache[pages, :, at % page_size].transpose(0, 1).double()

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self.key_cache,
            self.value_cache,
            self.page_table,
            self.row_starts,
            self.past_lens,
        )


def paged_batch(
    rng: torch.Generator,
    sequences: list[tuple[int, int]],
    *,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> PagedBatch:
    """Pages are handed out in random order; whatever no sequence has written yet is NaN."""
    counts = [-(-(past + rows) // page_size) for past, rows in sequences]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=rng).int()
    page_table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    shape = (num_pages, kv_heads, page_size, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    used = 0
    for seq, (past, rows) in enumerate(sequences):
        pages = order[used : used + counts[seq]]
        used += counts[seq]
        page_table[seq, : len(pages)] = pages
        at = torch.arange(past + rows)
        for cache in caches:
            fresh = normal(rng, past + rows, kv_heads, head_dim).to(dtype)
            cache[pages.long()[at // page_size], :, at % page_size] = fresh
    starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0)
    return PagedBatch(
        *caches,
        page_table,
        starts.int(),
        torch.tensor([past for past, _ in sequences], dtype=torch.int32),
        int(starts[-1]),
    )
