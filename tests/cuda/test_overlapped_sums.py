"""Sums of long passes during products: the values of products and sums one after the other.

The sum over ranks is a slow doubling on the second stream, so that a missing wait is noticed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.overlap import MIN_ROWS, halves_of
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.elementwise import LayerNorm, Norm, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.weights import GroupedColumns, GroupedLayout, GroupRun

pytestmark = pytest.mark.cuda

ROWS = (MIN_ROWS, MIN_ROWS + 1, 1500)
DELAY_CYCLES = 2_000_000  # about a millisecond


@pytest.fixture(scope="module")
def ops() -> CudaTable:
    table = get_table("cuda", threads=1)
    assert isinstance(table, CudaTable)
    return table


def matrix(ops: CudaTable, n: int, k: int, seed: int, *, has_bias: bool = False) -> PackedLinear:
    rng = torch.Generator().manual_seed(seed)
    runs = (GroupRun(4, k // 128, 128),)
    features = torch.randperm(k, generator=rng).int()
    w = ops.new_linear(GroupedLayout(n, k, runs, features, torch.float16, "middle", has_bias))
    codes = torch.randint(0, 16, (k, n), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(k // 128, n, generator=rng) * 0.3 / k**0.5).half()
    bias = torch.randn(n, generator=rng) if has_bias else None
    ops.fill_linear(w, 0, GroupedColumns("bytes", codes, scales=scales, offsets=None, bias=bias))
    return w


def slowly_doubled(part: Tensor) -> Tensor:
    torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]
    return part.mul_(2)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("reader", ["norm", "gated", "activated", "settle"])
def test_the_next_product_reads_complete_sums(ops: CudaTable, rows: int, reader: str) -> None:
    """Products of halves may sum in another order than those of all rows."""
    torch.manual_seed(rows)
    width, inner = 512, 384
    down = matrix(ops, width, inner, 1, has_bias=True)
    plain = matrix(ops, 256, width, 2, has_bias=True)
    pair = ops.join([matrix(ops, 128, width, 3), matrix(ops, 128, width, 4)])
    norms: list[Norm] = [
        RmsNorm(torch.rand(width, device="cuda") + 0.5, 1e-5),
        LayerNorm(torch.rand(width, device="cuda"), torch.randn(width, device="cuda"), 1e-5),
    ]
    sums = ops.overlapped_sums(slowly_doubled)
    x = torch.randn(rows, width, device="cuda")
    for norm in norms:
        h = torch.randn(rows, inner, device="cuda").half()
        expected = ops.linear_add_(h, down, x.clone()) * 2
        target = x.clone()
        assert sums.takes(h, down, target)
        sums.multiply(h, down, target, is_added=True)
        if reader == "norm":
            found = sums.norm_linear(target, norm, plain, None)
            assert found is not None
            assert relative_error(found, ops.norm_linear(expected, norm, plain)) < 1e-3
        elif reader == "gated":
            out, same = ops.activations(rows, 128), ops.activations(rows, 128)
            assert sums.norm_gated_linear(target, norm, pair, "silu", out) is out
            ops.norm_gated_linear(expected, norm, pair, "silu", same)
            assert relative_error(out, same) < 1e-3
        elif reader == "activated":
            out, same = ops.activations(rows, 256), ops.activations(rows, 256)
            assert sums.norm_activated_linear(target, norm, plain, "relu2", out) is out
            ops.norm_activated_linear(expected, norm, plain, "relu2", same)
            assert relative_error(out, same) < 1e-3
        else:
            assert sums.norm_linear(target.clone(), norm, plain, None) is None  # another tensor
            sums.settle()
        assert relative_error(target, expected) < 1e-5


def test_small_passes_and_other_matrices_are_left_to_the_caller(ops: CudaTable) -> None:
    sums = ops.overlapped_sums(slowly_doubled)
    w = matrix(ops, 128, 128, 1)
    few = torch.zeros(MIN_ROWS - 1, 128, device="cuda")
    assert not sums.takes(few.half(), w, few)
    invariant = get_table("cuda", threads=1, batch_invariant=True)
    assert isinstance(invariant, CudaTable)
    many = torch.zeros(MIN_ROWS, 128, device="cuda")
    same = matrix(invariant, 128, 128, 1)
    assert not invariant.overlapped_sums(slowly_doubled).takes(many.half(), same, many)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1024, 1025, 2047])
def test_halves_cover_every_row_once(rows: int) -> None:
    first, second = halves_of(rows)
    assert [*first, *second] == list(range(rows))
    assert len(first) % 128 == 0 or rows < 128
