"""Quantized linears in the shapes that matter to the kernels of the GPU, against float64.

Up to `MAX_DIRECT_ROWS` rows, kernels read the codes: the decode kernel, and from 9 rows on the
small-batch kernel of compute capability 9.0. Their C interface takes up to 128 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from kernel_support import assert_norm_within, normal, packed
from quant_support import GPU_BOUND, Matrix, Shape, filled, make_matrix
from torch import Tensor

from exl_core.ops.backends.cuda import matmul
from exl_core.ops.elementwise import GateKind, RmsNorm
from exl_core.ops.table import OpTable
from exl_core.ops.weights import WIDTHS, Formula
from exl_kernels import cuda

EPS = 1e-5
MIXED = ((5, 1, 128), (4, 6, 128), (3, 2, 128), (2, 1, 128), (6, 1, 128), (8, 1, 100))
Runs = tuple[tuple[int, int, int], ...]


class Exact:
    """x @ w (+ bias) in float64, computed on the GPU."""

    def __init__(self, table: OpTable, matrix: Matrix) -> None:
        self._device = table.device
        self._weights = matrix.weights().to(self._device)
        self._bias = matrix.bias

    def __call__(self, x: Tensor) -> Tensor:
        y = (x.double().to(self._device) @ self._weights.T).cpu()
        return y if self._bias is None else y + self._bias.double()


def check_rows(table: OpTable, matrix: Matrix, rng: torch.Generator, rows: Sequence[int]) -> None:
    w, exact = filled(table, matrix), Exact(table, matrix)
    for m in rows:
        x = normal(rng, m, matrix.layout.in_features)
        assert_norm_within(table.linear(x, w), exact(x), GPU_BOUND)


def normed(x: Tensor, norm: RmsNorm) -> Tensor:
    weight = norm.weight.double()
    return torch.nn.functional.rms_norm(x.double(), x.shape[1:], weight, norm.eps)


@pytest.mark.parametrize("formula", ["middle", "zeros", "minimums"])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_each_width_with_each_kind_of_offset(
    gpu_table: OpTable, rng: torch.Generator, bits: int, formula: Formula, scale_dtype: torch.dtype
) -> None:
    shape = Shape(((bits, 9, 128), (bits, 3, 32)), 96, formula, scale_dtype, permuted=True)
    check_rows(gpu_table, make_matrix(rng, shape), rng, (1, 8, 13, 32))


@pytest.mark.parametrize("n", [96, 4096])
@pytest.mark.parametrize("bits", WIDTHS)
def test_k_tiles_of_one_to_four_blocks(
    gpu_table: OpTable, rng: torch.Generator, bits: int, n: int
) -> None:
    """As of a rank whose input features are spread over all groups."""
    runs = ((bits, 7, 32), (bits, 9, 64), (bits, 5, 90), (bits, 6, 128), (bits, 1, 20))
    matrix = make_matrix(rng, Shape(runs, n, permuted=True))
    check_rows(gpu_table, matrix, rng, (8, 9, 17, 32, 64))


@pytest.mark.parametrize(("bits", "formula"), [(8, "e4m3"), (4, "iq4_nl")])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("runs", [((8, 128),), ((5, 32),), ((1, 640),), ((3, 100), (1, 40))])
def test_codes_that_are_not_integers(
    *,
    gpu_table: OpTable,
    rng: torch.Generator,
    bits: int,
    formula: Formula,
    scale_dtype: torch.dtype,
    runs: tuple[tuple[int, int], ...],
) -> None:
    shape = Shape(tuple((bits, *run) for run in runs), 96, scale_dtype=scale_dtype, formula=formula)
    matrix = make_matrix(rng, shape)
    check_rows(gpu_table, matrix, rng, (1, 2, 8, 9, 16, 33, 64, 97))
    ids = torch.tensor([95, 0, 41])
    rows = gpu_table.embedding(ids, filled(gpu_table, matrix)).cpu()
    assert torch.equal(rows, matrix.weights()[ids].float())


@pytest.mark.parametrize(
    ("scale_dtype", "most"), [(torch.float16, 6), (torch.float32, 40)], ids=["f16", "f32"]
)
@pytest.mark.parametrize("formula", ["middle", "minimums"])
@pytest.mark.parametrize("m", [1, 8, 13, 32, 64])
def test_panels_whose_scales_have_different_sizes(
    *,
    gpu_table: OpTable,
    rng: torch.Generator,
    m: int,
    formula: Formula,
    scale_dtype: torch.dtype,
    most: int,
) -> None:
    """A power of two for each column panel keeps the small-batch kernel's weights in range."""
    n = 9 * 32
    matrix = make_matrix(rng, Shape(MIXED, n, formula, scale_dtype, permuted=True))
    sizes = torch.linspace(-most, most, 9).round().exp2()
    sizes[4] = 0.0
    # Scales of about 1 / sqrt(k), so that float16 holds the largest.
    by_column = (sizes.repeat_interleave(32) / 32).to(scale_dtype)
    offsets = None if matrix.offsets is None else matrix.offsets * by_column
    matrix = replace(matrix, scales=matrix.scales * by_column, offsets=offsets)
    x = normal(rng, m, matrix.layout.in_features)

    y = gpu_table.linear(x, filled(gpu_table, matrix))

    exact = Exact(gpu_table, matrix)(x)
    assert bool((y[:, 4 * 32 : 5 * 32] == 0.0).all())
    for panel in (0, 1, 2, 3, 5, 6, 7, 8):
        own = slice(32 * panel, 32 * (panel + 1))
        assert_norm_within(y[:, own], exact[:, own], GPU_BOUND)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 128])
def test_any_number_of_rows(
    gpu_table: OpTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, m: int
) -> None:
    """Rows of the output may have gaps, which stay as they are."""
    monkeypatch.setattr(matmul, "MAX_DIRECT_ROWS", 128)
    matrix = make_matrix(rng, Shape(MIXED, 200, permuted=True, has_bias=True))
    x = normal(rng, m, matrix.layout.in_features)
    norm = RmsNorm(torch.ones(x.shape[1]), EPS)
    memory = torch.full((m, 203), torch.nan)

    gpu_table.norm_linear(x, norm, filled(gpu_table, matrix), memory[:, :200])

    exact = Exact(gpu_table, matrix)(normed(x, norm))
    assert_norm_within(memory[:, :200], exact, GPU_BOUND)
    assert memory[:, 200:].isnan().all()


@pytest.mark.parametrize(
    ("runs", "n"),
    [
        (((4, 1, 32),), 32),
        (((4, 1, 7),), 8),
        (((3, 5, 17), (8, 1, 1)), 100),
        (((4, 18, 32),), 1536),
        (((5, 1, 64), (4, 11, 128), (3, 1, 64)), 576),
        (((4, 344, 32),), 4096),
        (((6, 86, 128),), 1000),
        (((6, 18, 32),), 49152),
        (((2, 1, 4096),), 2048),
        (((8, 32, 128),), 4096),
        (((4, 112, 128),), 4096),
    ],
    ids=str,
)
def test_shapes_from_tiny_to_large(
    gpu_table: OpTable, rng: torch.Generator, runs: Runs, n: int
) -> None:
    shape = Shape(runs, n, "zeros" if n == 576 else "middle", permuted=True)
    check_rows(gpu_table, make_matrix(rng, shape), rng, (1, 5, 16, 20))


@pytest.mark.parametrize(
    ("runs", "n"),
    [
        (((4, 1, 7),), 8),
        (((3, 5, 17), (8, 1, 1)), 100),
        (((5, 1, 64), (4, 11, 128), (3, 1, 64)), 576),
        (((6, 11, 128), (2, 3, 96)), 1000),
        (((2, 1, 2048),), 257),
        (((8, 4, 128), (4, 30, 32)), 2300),
    ],
    ids=str,
)
def test_odd_shapes_with_more_rows_than_a_tile(
    gpu_table: OpTable,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    runs: Runs,
    n: int,
) -> None:
    monkeypatch.setattr(matmul, "MAX_DIRECT_ROWS", 128)
    shape = Shape(runs, n, "minimums" if n == 576 else "middle", permuted=True)
    check_rows(gpu_table, make_matrix(rng, shape), rng, (9, 24, 40, 64, 72, 128))


@pytest.mark.parametrize("m", [1, 8])
def test_more_runs_than_fit_into_a_launch(gpu_table: OpTable, rng: torch.Generator, m: int) -> None:
    runs = ((4, 1, 160), (3, 2, 40), (5, 1, 32)) * 6
    check_rows(gpu_table, make_matrix(rng, Shape(runs, 72, "zeros", permuted=True)), rng, (m,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 4, 16, 32, 40])
def test_joined_parts_of_different_permutations_and_widths(
    gpu_table: OpTable, rng: torch.Generator, dtype: torch.dtype, m: int
) -> None:
    matrices = [
        make_matrix(rng, Shape(((5, 2, 128), (4, 6, 128)), 512, permuted=True)),
        make_matrix(
            rng,
            Shape(((4, 4, 128), (3, 8, 64)), 100, "minimums", permuted=True, has_bias=True),
        ),
        make_matrix(rng, Shape(((8, 2, 512),), 128, "zeros", torch.float32, permuted=True)),
    ]
    w = gpu_table.join([filled(gpu_table, matrix) for matrix in matrices])
    x, norm = normal(rng, m, 1024), RmsNorm(normal(rng, 1024), EPS)
    out = torch.full((m, 740), torch.nan, dtype=dtype)

    gpu_table.norm_linear(x, norm, w, out)

    exact = torch.cat([Exact(gpu_table, one)(normed(x, norm)) for one in matrices], 1)
    assert_norm_within(out, exact, GPU_BOUND)


@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 8, 33, 96, 130])
def test_many_joined_parts_some_of_them_dense(
    *, gpu_table: OpTable, rng: torch.Generator, dtype: torch.dtype, m: int, is_permuted: bool
) -> None:
    """More parts and forms of inputs than one launch takes."""
    sizes = (512, 100, 64, 96, 40)
    shapes = [Shape(((4, 8, 128),), n, permuted=is_permuted) for n in sizes]
    matrices = [make_matrix(rng, shape) for shape in shapes]
    dense = [normal(rng, n, 1024).half().float() / 32 for n in (32, 7)]
    bias = normal(rng, 7)
    plain = [packed(gpu_table, dense[0], None), packed(gpu_table, dense[1], bias)]
    *first, last = (filled(gpu_table, matrix) for matrix in matrices)
    w = gpu_table.join([*first, *plain, last])
    x, norm = normal(rng, m, 1024), RmsNorm(normal(rng, 1024), EPS)
    out = torch.full((m, sum(sizes) + 39), torch.nan, dtype=dtype)

    gpu_table.norm_linear(x, norm, w, out)

    inputs = normed(x, norm)
    exact = [Exact(gpu_table, one)(inputs) for one in matrices]
    exact[-1:-1] = [inputs @ dense[0].double().T, inputs @ dense[1].double().T + bias]
    assert_norm_within(out, torch.cat(exact, 1), GPU_BOUND)


@pytest.mark.parametrize("m", [1, 8, 32, 70])
def test_a_product_is_added_to_the_residual(
    gpu_table: OpTable, rng: torch.Generator, m: int
) -> None:
    matrix = make_matrix(rng, Shape(MIXED, 264, permuted=True))
    x, before = normal(rng, m, matrix.layout.in_features), normal(rng, m, 264)
    residual = before.clone()
    gpu_table.linear_add_(x, filled(gpu_table, matrix), residual)
    exact = before.double() + Exact(gpu_table, matrix)(x)
    assert_norm_within(residual, exact, GPU_BOUND)


@pytest.mark.parametrize("m", [1, 8, 9, 32, 64])
@pytest.mark.parametrize("n", [3584, 5120, 8192, 10240])
def test_outputs_that_clusters_of_many_sizes_divide(
    gpu_table: OpTable, rng: torch.Generator, n: int, m: int
) -> None:
    """Numbers of output tiles of models' matrices. 13 groups are no multiple of any number of
    thread blocks."""
    matrix = make_matrix(rng, Shape(((5, 1, 128), (4, 11, 128), (3, 1, 96)), n, permuted=True))
    x, before = normal(rng, m, matrix.layout.in_features), normal(rng, m, n)
    residual = before.clone()
    gpu_table.linear_add_(x, filled(gpu_table, matrix), residual)
    assert_norm_within(residual, before.double() + Exact(gpu_table, matrix)(x), GPU_BOUND)


def check_gated(
    table: OpTable,
    rng: torch.Generator,
    pair: tuple[Matrix, Matrix],
    out: Tensor,
    kind: GateKind = "silu",
) -> None:
    x, norm = normal(rng, out.shape[0], 1024), RmsNorm(normal(rng, 1024), EPS)
    w = table.join([filled(table, matrix) for matrix in pair])
    table.norm_gated_linear(x, norm, w, kind, out)
    gate, up = (Exact(table, matrix)(normed(x, norm)) for matrix in pair)
    active = (
        torch.nn.functional.silu(gate)
        if kind == "silu"
        else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    assert_norm_within(out, active * up, GPU_BOUND)


@pytest.mark.parametrize("m", [12, 30, 64, 100])
@pytest.mark.parametrize("n", [40, 1536])
def test_gated_pairs_with_different_k_tiles(
    gpu_table: OpTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, n: int, m: int
) -> None:
    monkeypatch.setattr(matmul, "MAX_DIRECT_ROWS", 128)
    gate = Shape(((5, 1, 128), (4, 21, 32), (6, 1, 224)), n, "zeros", permuted=True)
    up = Shape(((8, 2, 256), (3, 4, 128)), n, permuted=True, has_bias=True)
    out = torch.full((m, n), torch.nan)
    check_gated(gpu_table, rng, (make_matrix(rng, gate), make_matrix(rng, up)), out)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("m", [1, 3, 9, 32, 33])
@pytest.mark.parametrize("n", [100, 1536])
def test_gated_pairs(
    gpu_table: OpTable, rng: torch.Generator, kind: GateKind, m: int, n: int
) -> None:
    has_bias = n == 100
    gate = Shape(((5, 1, 128), (4, 7, 128)), n, permuted=True, has_bias=has_bias)
    up = Shape(((4, 6, 128), (3, 2, 128)), n, permuted=True, has_bias=has_bias)
    out = torch.full((m, n), torch.nan, dtype=torch.float16)
    check_gated(gpu_table, rng, (make_matrix(rng, gate), make_matrix(rng, up)), out, kind)


@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("n", [8704, 9728, 14336, 17408])
def test_gated_pairs_that_clusters_of_many_sizes_divide(
    gpu_table: OpTable, rng: torch.Generator, n: int, m: int
) -> None:
    gate = make_matrix(rng, Shape(((5, 1, 128), (4, 7, 128)), n, permuted=True))
    up = make_matrix(rng, Shape(((4, 6, 128), (3, 2, 128)), n, permuted=True))
    out = torch.full((m, n), torch.nan, dtype=torch.float16)
    check_gated(gpu_table, rng, (gate, up), out)


def test_the_same_inputs_give_the_same_bits(gpu_table: OpTable, rng: torch.Generator) -> None:
    """Calls of different shapes share one workspace. `deep` reduces split-K sums in it."""
    small = make_matrix(rng, Shape(MIXED, 72, permuted=True))
    large = make_matrix(rng, Shape(((4, 32, 128),), 4128))
    deep = make_matrix(rng, Shape(((4, 112, 128),), 4096))
    linears = [filled(gpu_table, matrix) for matrix in (small, large, deep)]
    calls = [(w, normal(rng, m, w.in_features)) for w in linears for m in (1, 8, 32)]
    first = [gpu_table.linear(x, w) for w, x in calls]
    for _ in range(19):
        for (w, x), y in zip(calls, first, strict=True):
            assert torch.equal(gpu_table.linear(x, w), y)


def test_a_row_gives_the_same_bits_in_every_chunk(
    gpu_table: OpTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "MAX_DIRECT_ROWS", 128)
    w = filled(gpu_table, make_matrix(rng, Shape(MIXED, 96, permuted=True)))
    x = normal(rng, 64, w.in_features)
    once, twice = gpu_table.linear(x, w), gpu_table.linear(torch.cat([x, x]), w)
    assert torch.equal(twice[:64], once)
    assert torch.equal(twice[64:], once)


@pytest.mark.parametrize(("m", "groups"), [(1, 32), (20, 112)])
def test_consecutive_launches_see_each_others_results(
    gpu_table: OpTable, rng: torch.Generator, m: int, groups: int
) -> None:
    """A kernel starts before the previous one has ended. Each one here adds to its result."""
    matrix = make_matrix(rng, Shape(((4, groups, 128),), 4096, permuted=True))
    w, x = filled(gpu_table, matrix), normal(rng, m, 128 * groups)
    table = cast(Any, gpu_table).on_device
    on_device, sums = x.to(table.device), torch.zeros(m, 4096, device=table.device)
    for _ in range(50):
        table.linear_add_(on_device, w, sums)
    assert_norm_within(sums.cpu(), 50 * Exact(gpu_table, matrix)(x), GPU_BOUND)


def test_operands_outside_of_the_contract_are_refused(
    gpu_table: OpTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "MAX_DIRECT_ROWS", 129)
    w = filled(gpu_table, make_matrix(rng, Shape(((4, 1, 32),), 32)))
    table = cast(Any, gpu_table).on_device
    x = normal(rng, 129, 32).to(table.device)
    residual = torch.full((129, 32), torch.nan, device=table.device)
    with pytest.raises(cuda.CudaError, match="cudaErrorInvalidValue"):
        table.linear_add_(x, w, residual)
    with pytest.raises(cuda.CudaError, match="cudaErrorInvalidValue"):
        table.linear_add_(x[:1], w, residual[:1].half())
    assert residual.isnan().all()
