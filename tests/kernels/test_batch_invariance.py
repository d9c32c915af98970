"""Results of a row do not depend on the other rows of a call, on chunks, or on threads: same bits.

Each test computes many rows in one call, then the same rows in other divisions, and compares bits.
Shapes are random, as are the divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import cast

import pytest
import torch
from kernel_support import attention_input, is_gpu, normal, packed, strided_rows
from paged_support import attention, batch_of
from quant_support import TILE_SETS, Shape, filled, make_matrix
from torch import Tensor

from exl_core.ops.attention import AttentionRows, Scoring
from exl_core.ops.elementwise import LayerNorm, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable
from exl_core.ops.weights import Formula
from support.kv_caches import FORMATS
from support.profiles import examples

ROWS = 150  # decode, small batches and prefill of every backend
WEIGHT_TYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMULAS: list[Formula] = ["middle", "zeros", "minimums"]
NORM_EPS = 1e-5


def integer(rng: torch.Generator, low: int, high: int) -> int:
    """Random integer, low to high inclusive."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    )


def divisions(rng: torch.Generator, rows: int) -> Iterator[list[slice]]:
    """Single rows, then chunks of the sizes at which kernels change, then random chunks."""
    for size in (1, 2, 4, 5, 8, 9, 13, 16, 32, 33, 64, 65):
        yield [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
    bounds = sorted({0, rows, *(integer(rng, 1, rows - 1) for _ in range(4))})
    yield [slice(first, last) for first, last in pairwise(bounds)]


def check_rows(rng: torch.Generator, rows: int, compute: Callable[[slice], Tensor]) -> None:
    """`compute` gives the same bits for all rows at once and in every division."""
    whole = compute(slice(0, rows))
    for parts in divisions(rng, rows):
        got = torch.cat([compute(part) for part in parts])
        assert same_bits(got, whole), f"chunks of {parts[0].stop} rows give other bits"


def check_linear(table: OpTable, rng: torch.Generator, w: PackedLinear) -> None:
    """Every op that multiplies with `w`."""
    x = strided_rows(rng, ROWS, w.in_features)
    residual = 30 * normal(rng, ROWS, w.out_features)
    norm = RmsNorm(normal(rng, w.in_features), NORM_EPS)

    def added(part: slice) -> Tensor:
        sums = residual[part].clone()
        table.linear_add_(x[part], w, sums)
        return sums

    check_rows(rng, ROWS, lambda part: table.linear(x[part], w))
    check_rows(rng, ROWS, added)
    centered = LayerNorm(norm.weight, normal(rng, w.in_features), NORM_EPS)
    check_rows(rng, ROWS, lambda part: table.norm_linear(x[part], norm, w))
    check_rows(rng, ROWS, lambda part: table.norm_linear(x[part], centered, w))
    check_rows(
        rng,
        ROWS,
        lambda part: cast(Tensor, table.norm_activated_linear(x[part], norm, w, "gelu_tanh")),
    )
    if w.out_features % 2 == 0:
        check_rows(
            rng, ROWS, lambda part: cast(Tensor, table.norm_gated_linear(x[part], norm, w, "silu"))
        )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
def test_dense_rows_do_not_depend_on_their_batch(
    invariant_table: OpTable, rng: torch.Generator, dtype: torch.dtype, has_bias: bool
) -> None:
    for k in (integer(rng, 1, 60), integer(rng, 385, 1200)):  # 385: several blocks of k
        n = integer(rng, 1, 160)
        bias = normal(rng, n) if has_bias else None
        weight = normal(rng, n, k).to(dtype)
        check_linear(invariant_table, rng, packed(invariant_table, weight, bias))


def random_shape(rng: torch.Generator, bits: int | None, formula: Formula | None = None) -> Shape:
    """A matrix of one bit width, or of several (None), with groups of random sizes. `formula` is a
    random one of integers if it is None."""
    widths = [bits] * integer(rng, 1, 2) if bits else [8, 6, 5, 4, 3, 2]
    sizes = [16, 32, 64, 128, 32 * integer(rng, 3, 9), integer(rng, 33, 90)]
    runs = tuple((b, integer(rng, 1, 3), sizes[integer(rng, 0, 5)]) for b in widths)
    return Shape(
        runs,
        32 * integer(rng, 1, 4) + 2 * integer(rng, 0, 8),
        formula or FORMULAS[integer(rng, 0, 2)],
        torch.float16 if integer(rng, 0, 1) else torch.float32,
        permuted=bool(integer(rng, 0, 1)),
        has_bias=bool(integer(rng, 0, 1)),
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8, None])
def test_quantized_rows_do_not_depend_on_their_batch(
    invariant_table: OpTable, rng: torch.Generator, bits: int | None
) -> None:
    """EXL2, GPTQ and GGUF blocks have one run-time layout; widths and kinds of offsets differ."""
    for _ in range(examples(10)):
        matrix = make_matrix(rng, random_shape(rng, bits))
        check_linear(invariant_table, rng, filled(invariant_table, matrix))


@pytest.mark.parametrize(("bits", "formula"), [(6, "middle"), (3, "middle"), (2, "minimums")])
def test_rows_of_small_groups_do_not_depend_on_their_batch(
    invariant_table: OpTable, rng: torch.Generator, bits: int, formula: Formula
) -> None:
    """Q6_K, Q3_K and Q2_K."""
    for groups in (1, 32, integer(rng, 2, 90)):
        shape = Shape(((bits, groups, 16),), 32 * integer(rng, 1, 4), formula, torch.float32)
        check_linear(invariant_table, rng, filled(invariant_table, make_matrix(rng, shape)))


@pytest.mark.parametrize(("bits", "formula"), [(8, "e4m3"), (4, "iq4_nl")])
def test_rows_of_other_numbers_do_not_depend_on_their_batch(
    invariant_table: OpTable, rng: torch.Generator, bits: int, formula: Formula
) -> None:
    """FP8, and the table of IQ4_NL and IQ4_XS."""
    for _ in range(examples(10)):
        matrix = make_matrix(rng, random_shape(rng, bits, formula))
        check_linear(invariant_table, rng, filled(invariant_table, matrix))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
def test_rows_of_fp8_in_several_chunks_do_not_depend_on_their_batch(
    kernels: OpTable, rng: torch.Generator, scale_dtype: torch.dtype
) -> None:
    """Without the mode: few rows are converted in registers, more rows in memory."""
    if kernels.name in TILE_SETS:
        pytest.skip("AMX multiplies many rows in bfloat16 unless the mode is on")
    shape = Shape(((8, 11, 128), (8, 2, 96)), 80, "e4m3", scale_dtype, has_bias=True)
    check_linear(kernels, rng, filled(kernels, make_matrix(rng, shape)))


def test_large_matrices_do_not_depend_on_the_batch(
    invariant_table: OpTable, rng: torch.Generator
) -> None:
    """Matrices whose rows and columns a GPU divides among many thread blocks."""
    shape = Shape(((5, 3, 128), (4, 21, 128)), 4096 if is_gpu(invariant_table) else 96)
    matrix = make_matrix(rng, shape)
    same = [filled(invariant_table, matrix) for _ in range(2)]
    check_linear(invariant_table, rng, same[0])
    check_linear(invariant_table, rng, invariant_table.join(same))


def test_joined_rows_do_not_depend_on_their_batch(
    invariant_table: OpTable, rng: torch.Generator
) -> None:
    """Parts that share their quantized inputs, parts that do not, and a dense one."""
    for _ in range(examples(10)):
        shape = random_shape(rng, 4)
        same = make_matrix(rng, shape)
        other = make_matrix(rng, Shape(((8, 1, shape.k),), 64, "minimums"))
        dense = packed(invariant_table, normal(rng, 40, shape.k).half())
        parts = [filled(invariant_table, same), dense, filled(invariant_table, other)]
        check_linear(invariant_table, rng, invariant_table.join(parts))
        gate_up = [filled(invariant_table, same), filled(invariant_table, same)]
        check_linear(invariant_table, rng, invariant_table.join(gate_up))


def test_joined_rows_of_integers_and_of_other_numbers(
    invariant_table: OpTable, rng: torch.Generator
) -> None:
    """A GPU multiplies the two kinds by kernels that read different layouts of the inputs."""
    integers = make_matrix(rng, Shape(((4, 8, 128),), 64))
    others = make_matrix(rng, Shape(((4, 8, 128),), 64, "iq4_nl"))
    dense = normal(rng, 40, 1024).half()
    parts = [
        filled(invariant_table, integers),
        packed(invariant_table, dense),
        filled(invariant_table, others),
    ]
    joined, x = invariant_table.join(parts), normal(rng, 7, 1024)
    check_linear(invariant_table, rng, joined)
    each = torch.cat([invariant_table.linear(x, part) for part in parts], 1)
    assert torch.allclose(invariant_table.linear(x, joined), each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 100], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("name", FORMATS)
def test_attention_of_a_row_does_not_depend_on_its_batch(
    invariant_table: OpTable, rng: torch.Generator, name: str, window: int
) -> None:
    for _ in range(examples(5)):
        check_attention_of_one(invariant_table, rng, name, window)


def check_attention_of_one(table: OpTable, rng: torch.Generator, name: str, window: int) -> None:
    """One sequence in one call, in chunks, and row by row, each among other sequences or alone."""
    d, page_size = 32 * integer(rng, 1, 5), (256, 64, 16, 48)[integer(rng, 0, 3)]
    if is_gpu(table):  # its kernels exist for three head sizes, and for pages of 256 slots
        d, page_size = (64, 128, 256)[integer(rng, 0, 2)], 256
    elif name in {"f32", "f16", "fp8"}:
        d = integer(rng, 3, 130)
    kv_heads, group = integer(rng, 1, 2), integer(rng, 1, 8)
    past, rows = integer(rng, 0, 1200), integer(rng, 65, 100)
    softcap = 5.0 * integer(rng, 0, 1)
    sequences = [(integer(rng, 0, 700), integer(rng, 1, 20)), (past, rows), (3, 1)]
    batch = batch_of(rng, name, sequences, (kv_heads, d, page_size))
    q = attention_input(table, rng, batch.rows, kv_heads * group, d)
    first = int(batch.row_starts[1])
    alone, scoring = batch.only(1), Scoring(d**-0.5, window, softcap)

    def compute(part: slice) -> Tensor:
        seen = AttentionRows(
            alone.page_table,
            torch.tensor([0, part.stop - part.start], dtype=torch.int32),
            torch.tensor([past + part.start], dtype=torch.int32),
        )
        chunk = q[first + part.start : first + part.stop]
        return table.paged_attention(chunk, alone.cache, seen, scoring)

    together = attention(table, q, batch, window=window, softcap=softcap)
    assert same_bits(together[first : first + rows], compute(slice(0, rows)))
    check_rows(rng, rows, compute)


def test_elementwise_rows_do_not_depend_on_their_batch(
    invariant_table: OpTable, rng: torch.Generator
) -> None:
    for d in (integer(rng, 1, 70), 576):
        check_elementwise(invariant_table, rng, d)


def check_elementwise(table: OpTable, rng: torch.Generator, d: int) -> None:
    norm = RmsNorm(normal(rng, d), NORM_EPS)
    x, pairs = normal(rng, ROWS, d), normal(rng, ROWS, 2 * d)
    check_rows(rng, ROWS, lambda part: table.rms_norm(x[part], norm))
    check_rows(rng, ROWS, lambda part: table.gated_activation(pairs[part], "gelu_tanh"))
    check_rows(rng, ROWS, lambda part: table.log_sum_exp(x[part]))


@pytest.mark.parametrize("threads", [1, 3])
def test_results_do_not_depend_on_the_number_of_threads(
    kernels: OpTable, rng: torch.Generator, threads: int
) -> None:
    other = get_table("cpu", isa=kernels.name.removeprefix("cpu-"), threads=threads)
    for rows in (1, 7, ROWS):
        seed = integer(rng, 0, 2**31)
        first, second = (
            results_of(table, torch.Generator().manual_seed(seed), rows)
            for table in (kernels, other)
        )
        assert same_bits(first, second)


def results_of(table: OpTable, rng: torch.Generator, rows: int) -> Tensor:
    """Results of a quantized and a dense linear and of attention, for inputs drawn from `rng`."""
    matrix, weight = make_matrix(rng, random_shape(rng, None)), normal(rng, 300, 500).half()
    batch = batch_of(rng, "q4", [(900, rows), (40, 1)], (2, 64, 256))
    quantized = table.linear(normal(rng, rows, matrix.layout.in_features), filled(table, matrix))
    dense = table.linear(normal(rng, rows, 500), packed(table, weight))
    attended = attention(table, normal(rng, batch.rows, 6, 64), batch)
    return torch.cat([part.flatten() for part in (quantized, dense, attended)])
