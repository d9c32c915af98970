"""The many-rows kernel of the batch-invariant mode: the bits of the small-batch kernel.

The shapes are large enough for the mode to choose this kernel for all rows at once. It chooses the
small-batch kernel for parts of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from quant_support import Shape, filled, make_matrix
from torch import Tensor

from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable
from exl_core.ops.weights import Formula

pytestmark = pytest.mark.cuda

ROWS = 11 * 64 + 37
COLUMNS = 16 * 256 + 96
RUNS = {
    "4 bits": ((4, 24, 128),),
    "mixed": ((6, 1, 128), (5, 2, 64), (4, 9, 128), (3, 5, 32), (2, 3, 128)),
    "8 bits": ((8, 5, 256),),
    "odd groups": ((4, 13, 96), (8, 2, 40)),
    "short": ((4, 1, 32),),
}


@pytest.fixture(scope="module")
def table() -> OpTable:
    return get_table("cuda", isa=None, threads=1, batch_invariant=True)


def _check(compute: Callable[[slice], Tensor]) -> None:
    """All rows at once give the bits of parts of them."""
    whole = compute(slice(0, ROWS))
    assert whole.isfinite().all()
    parts = [slice(0, 64), slice(64, 80), slice(200, 227), slice(320, 321), slice(500, 503)]
    parts += [slice(640, 704), slice(11 * 64, ROWS)]
    for part in parts:
        got = compute(part)
        assert got.dtype is whole.dtype
        assert torch.equal(_bits(got), _bits(whole[part])), part


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def _check_linear(table: OpTable, rng: torch.Generator, w: PackedLinear) -> None:
    x = torch.randn(ROWS, w.in_features, generator=rng)
    norm = RmsNorm(torch.rand(w.in_features, generator=rng) + 0.5, 1e-5)
    residual = 30 * torch.randn(ROWS, w.out_features, generator=rng)
    on_gpu = x.cuda(), residual.cuda(), RmsNorm(norm.weight.cuda(), norm.eps)

    def added(part: slice) -> Tensor:
        sums = on_gpu[1][part].clone()
        table.linear_add_(on_gpu[0][part].contiguous(), w, sums)
        return sums

    def gated(part: slice) -> Tensor:
        found = table.norm_gated_linear(on_gpu[0][part].contiguous(), on_gpu[2], w, "silu")
        return cast(Tensor, found).contiguous()

    def activated(part: slice) -> Tensor:
        found = table.norm_activated_linear(on_gpu[0][part].contiguous(), on_gpu[2], w, "gelu_tanh")
        return cast(Tensor, found).contiguous()

    _check(lambda part: table.linear(on_gpu[0][part].contiguous(), w))
    _check(activated)
    _check(added)
    _check(lambda part: table.norm_linear(on_gpu[0][part].contiguous(), on_gpu[2], w))
    if w.out_features == 2 * COLUMNS:
        _check(gated)


@pytest.mark.parametrize("formula", ["middle", "zeros", "minimums"])
@pytest.mark.parametrize("runs", list(RUNS))
def test_many_rows_have_the_bits_of_few(table: OpTable, runs: str, formula: Formula) -> None:
    rng = torch.Generator().manual_seed(5)
    for dtype in (torch.float16, torch.float32):
        shape = Shape(RUNS[runs], COLUMNS, formula, dtype, permuted=True, has_bias=True)
        matrix = make_matrix(rng, shape)
        w = filled(table, matrix)
        _check_linear(table, rng, w)
        _check_linear(table, rng, table.join([w, filled(table, matrix)]))
