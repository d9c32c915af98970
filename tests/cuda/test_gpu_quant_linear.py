"""Quantized matrices times few rows, against products of the same codes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import pointer
from dataclasses import replace

import pytest
import torch
from cuda_support import (
    CHUNK_ROWS,
    TYPES,
    DeviceMatrix,
    Runs,
    packed,
    plan,
    prepare,
    random_plain,
)
from torch import Tensor

from exl_core.ops.backends.reference.quantized import PlainQuantized
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

FLOAT32_BOUND = 2e-3  # inputs are rounded to float16: 2^-11 / sqrt(3) of each, about 3e-4 in all
FLOAT16_BOUND = 2e-3
MIXED: Runs = ((5, 1, 128), (4, 6, 128), (3, 2, 128), (2, 1, 128), (6, 1, 128), (8, 1, 100))


class Workspace:
    """One workspace for all calls of a test, so that what a call leaves behind meets the next."""

    def __init__(self, max_n: int, max_m: int = 128) -> None:
        size = cuda.load().size("quant_linear_workspace", max_n, max_m)
        self.memory = torch.zeros(size, dtype=torch.uint8, device="cuda")


def run_linear(
    parts: Sequence[DeviceMatrix],
    x: Tensor,
    y: Tensor,
    workspace: Workspace,
    *,
    epilogue: int = cuda.STORE,
    gate: int = 0,
) -> None:
    args = cuda.QuantLinear()
    kept = []
    for i, part in enumerate(parts):
        kept.append(prepare(x, part.order))
        args.parts[i] = pointer(part.struct)
        args.inputs[i] = kept[-1].data_ptr()
    args.y, args.y_stride = y.data_ptr(), y.stride(0)
    args.count, args.m = len(parts), x.shape[0]
    args.y_dtype, args.epilogue, args.gate = TYPES[y.dtype], epilogue, gate
    args.workspace = workspace.memory.data_ptr()
    args.workspace_bytes = workspace.memory.numel()
    cuda.load().call("quant_linear", args, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def poisoned(m: int, n: int, dtype: torch.dtype = torch.float32, extra: int = 0) -> Tensor:
    """[m, n] of NaN, rows n + extra apart; what lies between must stay NaN."""
    return torch.full((m, n + extra), torch.nan, dtype=dtype, device="cuda")[:, :n]


def exact(plain: PlainQuantized, x: Tensor) -> Tensor:
    y = x.double() @ plain.matrix().T
    return y if plain.bias is None else y + plain.bias.double()


def error(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


def inputs(m: int, k: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(1000 * m + k + seed)
    return torch.randn(m, k, generator=rng).cuda()


@pytest.mark.parametrize("offset", ["middle", "zeros", "minimums"])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_each_width_with_each_kind_of_offset(offset, scale_dtype, bits):
    plain = random_plain(
        bits, [(bits, 9, 128), (bits, 3, 32)], 96, offset=offset, scale_dtype=scale_dtype
    )
    matrix, workspace = packed(plain), Workspace(96)
    for m in (1, 8, 13, 32):
        x, y = inputs(m, plain.in_features), poisoned(m, 96)
        run_linear([matrix], x, y, workspace)
        assert error(y, exact(plain, x)) < FLOAT32_BOUND


@pytest.mark.parametrize(
    ("scale_dtype", "most"), [(torch.float16, 6), (torch.float32, 40)], ids=["f16", "f32"]
)
@pytest.mark.parametrize("offset", ["middle", "minimums"])
@pytest.mark.parametrize("m", [1, 8, 13, 32, 64])
def test_strips_whose_scales_are_of_different_sizes(m, offset, scale_dtype, most):
    """Weights of some rows are kept in float16's range by a power of two for each strip."""
    n = 9 * 32
    plain = random_plain(m, MIXED, n, offset=offset, scale_dtype=scale_dtype)
    sizes = torch.linspace(-most, most, 9).round().exp2()
    sizes[4] = 0.0
    by_column = sizes.repeat_interleave(32).to(plain.scales)
    offsets = None if plain.offsets is None else plain.offsets * by_column
    plain = replace(plain, scales=plain.scales * by_column, offsets=offsets)
    x, y = inputs(m, plain.in_features), poisoned(m, n)
    run_linear([packed(plain)], x, y, Workspace(n))
    reference = exact(plain, x)
    assert bool((y[:, 4 * 32 : 5 * 32] == 0.0).all())
    for strip in (0, 1, 2, 3, 5, 6, 7, 8):
        own = slice(32 * strip, 32 * (strip + 1))
        assert error(y[:, own], reference[:, own]) < FLOAT32_BOUND


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 128])
def test_any_number_of_rows(m):
    plain = random_plain(m, MIXED, 200, has_bias=True)
    matrix, workspace = packed(plain), Workspace(200)
    x, y = inputs(m, plain.in_features), poisoned(m, 200, extra=3)
    run_linear([matrix], x, y, workspace)
    assert error(y, exact(plain, x)) < FLOAT32_BOUND
    assert y.as_strided((m, 3), (203, 1), 200).isnan().sum() >= 3 * m - 3


@pytest.mark.parametrize(
    ("runs", "n"),
    [
        ([(4, 1, 32)], 32),
        ([(4, 1, 7)], 8),
        ([(3, 5, 17), (8, 1, 1)], 100),
        ([(4, 18, 32)], 1536),
        ([(5, 1, 64), (4, 11, 128), (3, 1, 64)], 576),
        ([(4, 344, 32)], 4096),
        ([(6, 86, 128)], 1000),
        ([(6, 18, 32)], 49152),
        ([(2, 1, 4096)], 2048),
        ([(8, 32, 128)], 4096),
        ([(4, 112, 128)], 4096),
    ],
    ids=str,
)
def test_shapes_from_tiny_to_large(runs, n):
    plain = random_plain(n, runs, n, offset="zeros" if n == 576 else "middle")
    matrix, workspace = packed(plain), Workspace(n)
    for m in (1, 5, 16, 20):
        x, y = inputs(m, plain.in_features), poisoned(m, n)
        run_linear([matrix], x, y, workspace)
        assert error(y, exact(plain, x)) < FLOAT32_BOUND


@pytest.mark.parametrize(
    ("runs", "n"),
    [
        ([(4, 1, 7)], 8),
        ([(3, 5, 17), (8, 1, 1)], 100),
        ([(5, 1, 64), (4, 11, 128), (3, 1, 64)], 576),
        ([(6, 11, 128), (2, 3, 96)], 1000),
        ([(2, 1, 2048)], 257),
        ([(8, 4, 128), (4, 30, 32)], 2300),
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [9, 24, 40, 64, 72, 128])
def test_awkward_shapes_of_more_rows_than_a_tile(runs, n, m):
    plain = random_plain(n, runs, n, offset="minimums" if n == 576 else "middle")
    x, y = inputs(m, plain.in_features), poisoned(m, n)
    run_linear([packed(plain)], x, y, Workspace(n))
    assert error(y, exact(plain, x)) < FLOAT32_BOUND


@pytest.mark.parametrize("m", [12, 30, 64, 100])
@pytest.mark.parametrize("n", [40, 1536])
def test_gated_pairs_whose_units_differ(n, m):
    gate = random_plain(3, [(5, 1, 128), (4, 21, 32), (6, 1, 224)], n, offset="zeros")
    up = random_plain(4, [(8, 2, 256), (3, 4, 128)], n, has_bias=True)
    x, y = inputs(m, 1024), poisoned(m, n)
    run_linear([packed(gate), packed(up)], x, y, Workspace(2 * n), epilogue=cuda.GATED)
    activated = torch.nn.functional.silu(exact(gate, x))
    assert error(y, activated * exact(up, x)) < FLOAT32_BOUND


@pytest.mark.parametrize("m", [1, 8])
def test_more_runs_than_come_with_a_launch(m):
    plain = random_plain(8, [(4, 1, 160), (3, 2, 40), (5, 1, 32)] * 6, 72, offset="zeros")
    matrix, workspace = packed(plain), Workspace(72)
    x, y = inputs(m, plain.in_features), poisoned(m, 72)
    run_linear([matrix], x, y, workspace)
    assert error(y, exact(plain, x)) < FLOAT32_BOUND


def test_units_come_in_the_order_of_their_groups():
    """The plan that the other tests rest on: a group of 5 blocks is a unit of 4 and one of 1."""
    layout = random_plain(0, [(4, 1, 150)], 32).layout
    assert [unit.blocks for unit in plan(layout).units] == [4, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("m", [1, 4, 16, 32, 40])
def test_joined_parts_of_different_orders_and_widths(dtype, m):
    plains = [
        random_plain(1, [(5, 2, 128), (4, 6, 128)], 512),
        random_plain(2, [(4, 4, 128), (3, 8, 64)], 100, offset="minimums", has_bias=True),
        random_plain(3, [(8, 2, 512)], 128, scale_dtype=torch.float32, offset="zeros"),
    ]
    parts, workspace = [packed(plain) for plain in plains], Workspace(740)
    x, y = inputs(m, 1024), poisoned(m, 740, dtype)
    run_linear(parts, x, y, workspace)
    reference = torch.cat([exact(plain, x) for plain in plains], 1)
    assert error(y, reference) < (FLOAT16_BOUND if dtype == torch.float16 else FLOAT32_BOUND)


@pytest.mark.parametrize("m", [1, 8, 32, 70])
def test_a_product_is_added_to_what_is_there(m):
    plain = random_plain(m, MIXED, 264)
    matrix, workspace = packed(plain), Workspace(264)
    x = inputs(m, plain.in_features)
    before = torch.randn(m, 264, device="cuda")
    y = before.clone()
    run_linear([matrix], x, y, workspace, epilogue=cuda.ADD)
    assert error(y, before.double() + exact(plain, x)) < FLOAT32_BOUND


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("m", [1, 3, 9, 32, 33])
@pytest.mark.parametrize("n", [100, 1536])
def test_gated_pairs(kind, m, n):
    gate = random_plain(1, [(5, 1, 128), (4, 7, 128)], n, has_bias=n == 100)
    up = random_plain(2, [(4, 6, 128), (3, 2, 128)], n, has_bias=n == 100)
    workspace = Workspace(2 * n)
    x, y = inputs(m, 1024), poisoned(m, n, torch.float16)
    parts = [packed(gate), packed(up)]
    run_linear(parts, x, y, workspace, epilogue=cuda.GATED, gate=cuda.GATES[kind])
    first = exact(gate, x)
    if kind == "silu":
        activated = torch.nn.functional.silu(first)
    else:
        activated = torch.nn.functional.gelu(first, approximate="tanh")
    assert error(y, activated * exact(up, x)) < FLOAT16_BOUND


def test_the_same_inputs_give_the_same_bits():
    small = random_plain(1, MIXED, 72)
    large = random_plain(2, [(4, 32, 128)], 4128)
    deep = random_plain(3, [(4, 112, 128)], 4096)  # sums of some rows meet in the workspace
    workspace = Workspace(4128)
    matrices = [packed(small), packed(large), packed(deep)]
    seen: dict[tuple[int, int], Tensor] = {}
    for _ in range(20):
        for which, plain in enumerate((small, large, deep)):
            for m in (1, 8, 32):
                x, y = inputs(m, plain.in_features), poisoned(m, plain.out_features)
                run_linear([matrices[which]], x, y, workspace)
                first = seen.setdefault((which, m), y.clone())
                assert torch.equal(first, y)


def test_a_row_counts_the_same_in_whatever_chunk_it_is():
    plain = random_plain(5, MIXED, 96)
    matrix, workspace = packed(plain), Workspace(96)
    x = inputs(CHUNK_ROWS, plain.in_features)
    twice, once = poisoned(2 * CHUNK_ROWS, 96), poisoned(CHUNK_ROWS, 96)
    run_linear([matrix], torch.cat([x, x]), twice, workspace)
    run_linear([matrix], x, once, workspace)
    assert torch.equal(twice[:CHUNK_ROWS], once)
    assert torch.equal(twice[CHUNK_ROWS:], once)


@pytest.mark.parametrize(("m", "groups"), [(1, 32), (20, 112)])
def test_launches_in_a_row_see_each_other(m, groups):
    """Kernels begin before the one ahead ends; each here adds to what the one before has left."""
    plain = random_plain(6, [(4, groups, 128)], 4096)
    matrix, workspace = packed(plain), Workspace(4096)
    x = inputs(m, plain.in_features)
    y = torch.zeros(m, 4096, device="cuda")
    args = cuda.QuantLinear()
    prepared = prepare(x, matrix.order)
    args.parts[0], args.inputs[0] = pointer(matrix.struct), prepared.data_ptr()
    args.y, args.y_stride, args.count, args.m = y.data_ptr(), 4096, 1, m
    args.y_dtype, args.epilogue = TYPES[torch.float32], cuda.ADD
    args.workspace = workspace.memory.data_ptr()
    args.workspace_bytes = workspace.memory.numel()
    for _ in range(50):
        cuda.load().call("quant_linear", args, torch.cuda.current_stream().cuda_stream)
    assert error(y, 50 * exact(plain, x)) < FLOAT32_BOUND


def test_operands_outside_the_contract_are_refused():
    plain = random_plain(7, [(4, 1, 32)], 32)
    matrix, workspace = packed(plain), Workspace(32)
    y = poisoned(129, 32)
    with pytest.raises(cuda.CudaError, match="cudaErrorInvalidValue"):
        run_linear([matrix], inputs(129, 32), y, workspace)
    with pytest.raises(cuda.CudaError, match="cudaErrorInvalidValue"):
        run_linear([matrix], inputs(1, 32), y.half(), workspace, epilogue=cuda.ADD)
    assert y.isnan().all()
