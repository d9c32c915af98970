"""Inputs and error bounds that the tests of all ops share."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from exl_core.ops.elementwise import GateKind, Norm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable
from exl_core.ops.weights import DenseColumns, DenseLayout

UNIT = 2.0**-24  # half a unit in the last place of float32: the error of one rounding


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng)


def strided_rows(rng: torch.Generator, rows: int, *rest: int) -> Tensor:
    """Random [rows, *rest] with gaps between rows, as in a view of a fused projection."""
    width = int(torch.Size(rest).numel())
    return normal(rng, rows, width + 11)[:, 3 : 3 + width].view(rows, *rest)


def attention_input(table: OpTable, rng: torch.Generator, rows: int, *rest: int) -> Tensor:
    """`strided_rows`; for a GPU, whose attention reads 16 bytes at a time, rows are aligned so."""
    if not is_gpu(table):
        return strided_rows(rng, rows, *rest)
    width = int(torch.Size(rest).numel())
    return normal(rng, rows, width + 16)[:, 8 : 8 + width].view(rows, *rest)


def gated_linear(
    table: OpTable,
    x: Tensor,
    norm: Norm,
    w: PackedLinear,
    kind: GateKind,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`norm_gated_linear` to a tensor."""
    return cast(Tensor, table.norm_gated_linear(x, norm, w, kind, out))


def is_gpu(table: OpTable) -> bool:
    return table.name.startswith("cuda")


def activation_types(table: OpTable) -> list[torch.dtype]:
    """Types of activations that the backend takes: float32, and float16 on a GPU."""
    return [torch.float32, torch.float16] if is_gpu(table) else [torch.float32]


def assert_within(got: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """Every value differs from the float64 result by at most its bound; NaN always fails."""
    assert got.shape == exact.shape
    error = (got.double() - exact).abs()
    allowed = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    wrong = ~(error <= allowed)
    if wrong.any():
        worst = (error / allowed)[wrong].nan_to_num(nan=torch.inf).max()
        raise AssertionError(f"{int(wrong.sum())} values off, worst {float(worst):.3g} bounds")


def assert_norm_within(got: Tensor, exact: Tensor, bound: float) -> None:
    """The error of all values together, relative to the norm of the float64 result."""
    assert got.shape == exact.shape
    assert bool(got.isfinite().all())
    error = float((got.double() - exact).norm())
    assert error <= bound * float(exact.norm()), f"{error / float(exact.norm()):.3g}"


def assert_near(
    table: OpTable, got: Tensor, exact: Tensor, bound: Tensor | float, gpu_bound: float
) -> None:
    """`assert_within(bound)`; on a GPU `assert_norm_within(gpu_bound)`.

    The GPU's functions are approximate far from zero, and inputs of its products are rounded to
    float16. No bound of each value would be tight there.
    """
    if is_gpu(table):
        assert_norm_within(got, exact, gpu_bound)
    else:
        assert_within(got, exact, bound)


def packed(table: OpTable, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    rows, columns = weight.shape
    w = table.new_linear(DenseLayout(rows, columns, weight.dtype, bias is not None))
    table.fill_linear(w, 0, DenseColumns(weight, bias))
    return w
