"""Quantized linears: every width, group size, offset and order, against the formula in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from kernel_support import UNIT, assert_within, gated_linear, normal, packed, strided_rows
from quant_support import (
    Matrix,
    Shape,
    answer,
    assert_product,
    columns_of,
    filled,
    make_matrix,
    words_of,
)
from torch import Tensor

from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import available_isas, get_table
from exl_core.ops.table import OpTable
from exl_core.ops.weights import WIDTHS, Formula, GroupedColumns, GroupedLayout, GroupRun, Packing

# 8, 16: tiles of the integer products; 17 and more: other strategies, by instruction set.
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 130)
F32 = torch.float32
EXL2_MIX = ((8, 1, 32), (6, 2, 32), (5, 2, 64), (4, 4, 128), (3, 3, 128), (2, 3, 128), (2, 1, 64))
SHAPES = (
    *(Shape(((bits, 3, 32),), 40) for bits in WIDTHS),
    *(Shape(((bits, 4, 24),), 24, "zeros", permuted=True) for bits in WIDTHS),
    *(Shape(((bits, 2, 64), (bits, 1, 40)), 16, "minimums") for bits in WIDTHS),
    *(Shape(((bits, 6, 16),), 40, scale_dtype=F32) for bits in WIDTHS),
    *(Shape(((bits, 7, 16), (bits, 1, 64)), 24, "minimums", permuted=True) for bits in WIDTHS),
    Shape(((6, 80, 16),), 100, scale_dtype=F32, has_bias=True),
    Shape(((3, 48, 16),), 33, scale_dtype=F32, permuted=True),
    Shape(((2, 64, 16),), 72, "minimums", F32),
    Shape(((5, 9, 16), (4, 3, 128), (8, 1, 16)), 40, "zeros"),
    Shape(((4, 6, 16),), 24, formula="iq4_nl"),
    Shape(((8, 6, 16),), 24, formula="e4m3"),
    Shape(EXL2_MIX, 24, permuted=True),
    Shape(EXL2_MIX, 40, "zeros", F32),
    Shape(((4, 1, 32), (8, 1, 32), (3, 1, 32)), 16, "minimums", permuted=True, has_bias=True),
    Shape(((5, 1, 32),), 16, has_bias=True),
    Shape(((4, 6, 16),), 24, "zeros"),
    Shape(((3, 1, 16), (4, 1, 24), (8, 1, 32), (6, 1, 24)), 40),
    Shape(((4, 9, 64),), 576, "zeros", permuted=True, has_bias=True),
    Shape(((4, 18, 32),), 576, "minimums"),
    Shape(((4, 4, 128), (4, 1, 96)), 40, has_bias=True),
    Shape(((4, 1, 608),), 24, "zeros", F32),
    Shape(((2, 1, 1536),), 24, "middle", F32, permuted=True),
    Shape(((8, 12, 128),), 16, "minimums", F32),
    Shape(((8, 1, 100),), 7, "zeros", has_bias=True),
    Shape(((6, 1, 1),), 1),
    Shape(((8, 4, 128), (8, 1, 96)), 40, formula="e4m3"),
    Shape(((8, 1, 608),), 24, scale_dtype=F32, formula="e4m3", has_bias=True),
    Shape(((8, 3, 32),), 7, permuted=True, formula="e4m3"),
    Shape(((4, 8, 32),), 40, formula="iq4_nl"),
    Shape(((4, 3, 64),), 24, scale_dtype=F32, permuted=True, formula="iq4_nl", has_bias=True),
    Shape(((4, 4, 24),), 7, formula="iq4_nl"),
    Shape(((4, 8, 32),), 40, "mxfp4", torch.uint8),
    Shape(((4, 3, 64),), 24, "mxfp4", torch.uint8, permuted=True, has_bias=True),
    Shape(((4, 4, 24),), 7, "mxfp4", torch.uint8),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantized_linear_is_near_the_formula(
    table: OpTable, rng: torch.Generator, shape: Shape
) -> None:
    matrix = make_matrix(rng, shape)
    w = filled(table, matrix)
    for rows in ROWS:
        x = strided_rows(rng, rows, shape.k)

        y = table.linear(x, w)

        assert y.dtype == torch.float32 and y.is_contiguous()
        assert_product(table, y, answer(table, matrix, x))


def whole_numbers(rng: torch.Generator, matrix: Matrix, rows: int) -> Tensor:
    """Activations that every strategy represents exactly: 127 is the largest of each span."""
    x = torch.randint(-127, 128, (rows, matrix.layout.in_features), generator=rng).float()
    first = 0
    for size in torch.bincount(matrix.row_groups).tolist():
        x[:, matrix.features[first : first + size : 128]] = 127
        first += size
    return x


@pytest.mark.parametrize("formula", ["middle", "zeros", "minimums"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_whole_numbers_multiply_exactly(
    cpu_table: OpTable, rng: torch.Generator, bits: int, formula: Formula
) -> None:
    """Scales are 1. Codes, zeros and sums are small integers, so that any wrong index shows."""
    runs = ((bits, 1, 32), (bits, 5, 16), (bits, 1, 160), (bits, 4, 16), (bits, 1, 24))
    shape = Shape(runs, 45, formula, permuted=True)
    matrix = make_matrix(rng, shape)
    matrix.scales.fill_(1.0)
    if formula == "minimums" and matrix.offsets is not None:
        whole = torch.randint(-9, 1, matrix.offsets.shape, generator=rng)
        matrix.offsets.copy_(whole)
    w = filled(cpu_table, matrix)
    for rows in (1, 5, 9, 40):
        x = whole_numbers(rng, matrix, rows)
        assert torch.equal(cpu_table.linear(x, w).double(), x.double() @ matrix.weights().T)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_embedding_of_a_quantized_matrix_rounds_once(
    cpu_table: OpTable, rng: torch.Generator, shape: Shape
) -> None:
    matrix = make_matrix(rng, shape)
    ids = torch.tensor([shape.n - 1, 0, shape.n // 2, 0])

    rows = cpu_table.embedding(ids, filled(cpu_table, matrix))

    exact = matrix.weights()[ids]
    if shape.formula == "minimums":  # two float32 operations
        assert_within(rows, exact, 2 * UNIT * matrix.magnitudes()[ids])
    else:
        assert torch.equal(rows, exact.float())


def same(table: OpTable, rng: torch.Generator, one: PackedLinear, other: PackedLinear) -> bool:
    x = normal(rng, 3, one.in_features)
    ids = torch.arange(one.out_features)
    return torch.equal(table.linear(x, one), table.linear(x, other)) and torch.equal(
        table.embedding(ids, one), table.embedding(ids, other)
    )


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(((bits, 5, 32),), 40) for bits in WIDTHS),
        Shape(EXL2_MIX, 40, permuted=True),
        Shape(((3, 1, 33), (5, 2, 7), (6, 1, 3)), 40, "zeros"),
        Shape(((6, 5, 16), (3, 4, 16), (2, 3, 16)), 40),
    ],
    ids=str,
)
def test_words_hold_what_bytes_hold(cpu_table: OpTable, rng: torch.Generator, shape: Shape) -> None:
    """Codes that straddle words, and runs that begin within one."""
    matrix = make_matrix(rng, shape)
    w = cpu_table.new_linear(matrix.layout)
    for first, last in ((32, 40), (0, 16), (16, 32)):
        cpu_table.fill_linear(w, first, columns_of(matrix, first, last, "words"))

    assert same(cpu_table, rng, w, filled(cpu_table, matrix))


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("packing", ["words", "bytes"])
def test_source_rows_put_rows_in_order(
    cpu_table: OpTable, rng: torch.Generator, packing: Packing, group: int
) -> None:
    """GPTQ with act-order: rows are stored in feature order, groups are not."""
    matrix = make_matrix(rng, Shape(((4, 3, group),), 24, "zeros", permuted=True))
    order = matrix.features
    by_feature = torch.empty_like(matrix.codes)
    by_feature[order] = matrix.codes
    codes = by_feature if packing == "bytes" else words_of(by_feature, matrix.row_bits)
    w = cpu_table.new_linear(matrix.layout)

    cpu_table.fill_linear(
        w, 0, GroupedColumns(packing, codes, order.int(), matrix.scales, matrix.offsets)
    )

    assert same(cpu_table, rng, w, filled(cpu_table, matrix))


@pytest.mark.parametrize(
    ("packing", "bits", "formula"),
    [
        ("q4_0", 4, "middle"),
        ("q4_1", 4, "minimums"),
        ("q5_0", 5, "middle"),
        ("q5_1", 5, "minimums"),
        ("q8_0", 8, "middle"),
    ],
)
def test_ggml_blocks_agree_with_the_gguf_package(
    cpu_table: OpTable, rng: torch.Generator, packing: Packing, bits: int, formula: Formula
) -> None:
    kind = gguf.GGMLQuantizationType[packing.upper()]
    values = normal(rng, 40, 96).numpy()
    values[3] = 0.0
    blocks = torch.from_numpy(gguf.quants.quantize(values, kind))
    w = cpu_table.new_linear(
        GroupedLayout(40, 96, (GroupRun(bits, 3, 32),), None, torch.float16, formula)
    )
    wide = torch.cat([blocks, blocks], dim=1)  # rows with gaps

    cpu_table.fill_linear(w, 16, GroupedColumns(packing, blocks[16:]))
    cpu_table.fill_linear(w, 0, GroupedColumns(packing, wide[:16, : blocks.shape[1]]))

    exact = gguf.quants.dequantize(blocks.numpy(), kind).astype(np.float32)
    assert torch.equal(cpu_table.embedding(torch.arange(40), w), torch.from_numpy(exact))


def test_columns_may_be_filled_by_several_threads(cpu_table: OpTable, rng: torch.Generator) -> None:
    matrix = make_matrix(rng, Shape(((4, 8, 32),), 16 * 20 + 5, "zeros", has_bias=True))
    w = cpu_table.new_linear(matrix.layout)
    parts = [columns_of(matrix, at, min(at + 16, 325), "words") for at in range(0, 325, 16)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: cpu_table.fill_linear(w, 16 * i, parts[i]), range(len(parts))))

    assert same(cpu_table, rng, w, filled(cpu_table, matrix))


def test_quantized_linear_reports_its_sizes(cpu_table: OpTable, rng: torch.Generator) -> None:
    w = filled(cpu_table, make_matrix(rng, Shape(((4, 32, 128),), 512)))

    assert (w.out_features, w.in_features) == (512, 4096)
    codes = 1 if cpu_table.name == "reference" else 0.5  # bytes each
    smallest = 512 * 4096 * codes + 512 * 32 * 2
    assert smallest <= w.size_bytes < smallest + 4096


@pytest.mark.parametrize(("formula", "bits", "expected"), [("middle", 6, 8), ("minimums", 2, 6)])
def test_groups_of_16_rows_take_no_padding(
    rng: torch.Generator, formula: Formula, bits: int, expected: int
) -> None:
    """Q6_K and Q2_K: the codes, and 2 bits per weight for each grid of float32."""
    table = get_table("cpu", threads=1)
    matrix = make_matrix(rng, Shape(((bits, 32, 16),), 64, formula, F32))

    assert table.min_group_rows == 16
    assert filled(table, matrix).size_bytes == 64 * 512 * expected // 8
    assert matrix.layout.size_bytes(table.min_group_rows) == 64 * 512 * expected // 8
    assert matrix.layout.size_bytes() == 64 * 512 * (expected + bits) // 8


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("runs", [((4, 3, 64), (3, 1, 32)), ((6, 14, 16),)], ids=str)
def test_nan_and_infinity_stay_in_their_row(
    cpu_table: OpTable,
    rng: torch.Generator,
    rows: int,
    bad: float,
    runs: tuple[tuple[int, int, int], ...],
) -> None:
    matrix = make_matrix(rng, Shape(runs, 24, "zeros", permuted=True))
    x = normal(rng, rows, 224)
    x[rows - 1, 31] = bad

    y = cpu_table.linear(x, filled(cpu_table, matrix))

    assert not y[rows - 1].isfinite().any()
    assert y[: rows - 1].isfinite().all()


@pytest.mark.parametrize("formula", ["middle", "zeros", "minimums"])
def test_extreme_activations_and_scales_stay_within_bounds(
    cpu_table: OpTable, rng: torch.Generator, formula: Formula
) -> None:
    runs = ((4, 4, 128), (8, 2, 32), (6, 4, 16), (2, 4, 16))
    matrix = make_matrix(rng, Shape(runs, 40, formula, permuted=True))
    matrix.scales[0], matrix.scales[1, ::2] = 0.0, 2.0**-24  # the smallest of float16
    w = filled(cpu_table, matrix)
    for rows in (6, 36):
        x = normal(rng, rows, 704)
        x[:, 77] = 1e4  # a channel of outliers, which models have
        x[0] = 0.0
        x[1] = 1e-40 * normal(rng, 704)
        x[2] *= 1e30
        x[3] = 0.0
        x[3, 5] = 3.0
        x[4, :300] = 1e-20

        right = answer(cpu_table, matrix, x)

        assert_within(cpu_table.linear(x, w), right.exact, right.bound)


def test_no_rows_give_no_rows(table: OpTable, rng: torch.Generator) -> None:
    w = filled(table, make_matrix(rng, Shape(((4, 1, 32),), 20)))

    assert table.linear(torch.empty(0, 32), w).shape == (0, 20)
    assert table.embedding(torch.empty(0, dtype=torch.int64), w).shape == (0, 32)


def joined_parts(table: OpTable, rng: torch.Generator) -> list[PackedLinear]:
    """Parts like q, k and v of an EXL2 file: orders of their own, a bias, one dense matrix."""
    return [
        filled(table, make_matrix(rng, Shape(((4, 3, 32),), 40, permuted=True, has_bias=True))),
        packed(table, normal(rng, 24, 96).half()),
        filled(table, make_matrix(rng, Shape(((6, 1, 64), (3, 1, 32)), 24, "zeros"))),
        filled(table, make_matrix(rng, Shape(((3, 6, 16),), 40, scale_dtype=F32))),
    ]


@pytest.mark.parametrize("rows", [1, 9, 33])
def test_a_joined_linear_is_its_parts_side_by_side(
    cpu_table: OpTable, rng: torch.Generator, rows: int
) -> None:
    parts = joined_parts(cpu_table, rng)
    x = strided_rows(rng, rows, 96)
    for chosen in (parts, parts[:1], parts[::2], [cpu_table.join(parts[1:]), parts[0]]):
        joined = cpu_table.join(chosen)

        assert (joined.in_features, joined.out_features) == (
            96,
            sum(p.out_features for p in chosen),
        )
        expected = torch.cat([cpu_table.linear(x, part) for part in chosen], dim=1)
        assert torch.equal(cpu_table.linear(x, joined), expected)


def test_results_do_not_depend_on_the_number_of_threads(rng: torch.Generator) -> None:
    matrix = make_matrix(rng, Shape(EXL2_MIX, 700, permuted=True))
    whole = make_matrix(rng, Shape(((4, 7, 64), (6, 8, 16)), 600, "zeros"))
    wide, narrow = normal(rng, 130, matrix.layout.in_features), normal(rng, 130, 576)
    norm = RmsNorm(normal(rng, 576), 1e-5)
    for isa in available_isas():
        results = []
        for threads in (1, 2, 5):
            table = get_table("cpu", isa=isa, threads=threads)
            w, gate_up = filled(table, matrix), filled(table, whole)
            ys = [table.linear(wide[:m], w) for m in (1, 9, 130)]
            ys += [gated_linear(table, narrow[:m], norm, gate_up, "silu") for m in (1, 40)]
            results.append(ys)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), isa
