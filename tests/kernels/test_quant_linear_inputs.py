"""Quantized operands that break a contract raise an error that names them, and never crash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from quant_support import Shape, columns_of, filled, make_matrix

import exl_kernels
from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable
from exl_core.ops.weights import DenseLayout, GroupedColumns, GroupedLayout, GroupRun

LAYOUT = GroupedLayout(40, 96, (GroupRun(4, 3, 32),), None, torch.float16, "middle")
ORDER = torch.arange(96, dtype=torch.int32)
ZEROS = replace(LAYOUT, formula="zeros", has_bias=True)


@pytest.fixture
def table(cpu_table: OpTable) -> OpTable:
    """Backends that check their operands: all but the GPU."""
    return cpu_table


def runs(*values: tuple[int, int, int]) -> tuple[GroupRun, ...]:
    return tuple(GroupRun(*run) for run in values)


def same_twice() -> torch.Tensor:
    order = ORDER.clone()
    order[5] = 6
    return order


@pytest.mark.parametrize(
    "change",
    [
        {"runs": runs((7, 3, 32))},
        {"runs": runs((1, 3, 32))},
        {"runs": runs((16, 3, 32))},
        {"runs": runs((4, 2, 32))},
        {"runs": runs((4, 4, 32))},
        {"runs": runs((4, 3, 32), (4, 0, 32))},
        {"runs": runs((4, 3, 32), (4, 1, 0))},
        {"runs": runs((4, 4, 32), (4, 1, -32))},
        {"runs": runs((4, -1, 32), (4, 4, 32))},
        {"runs": runs((4, 2**62, 2**62))},
        {"runs": ()},
        {"out_features": 0},
        {"in_features": 0, "runs": ()},
        {"out_features": -16},
        {"features": ORDER.long()},
        {"features": ORDER[:95]},
        {"features": ORDER + 1},
        {"features": ORDER - 1},
        {"features": same_twice()},
        {"scale_dtype": torch.bfloat16},
        {"scale_dtype": torch.int32},
        {"formula": "above"},
        {"formula": "e4m3"},  # of 4 bits
        {"formula": "iq4_nl", "runs": runs((5, 3, 32))},
        {"formula": "mxfp4"},  # with scales of float16
        {"scale_dtype": torch.uint8},  # of integers
    ],
    ids=str,
)
def test_impossible_layouts_are_refused(table: OpTable, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"new_linear|QuantLinear"):
        table.new_linear(replace(LAYOUT, **change))


def good_columns() -> GroupedColumns:
    return GroupedColumns(
        "bytes",
        torch.ones(96, 40, dtype=torch.uint8),
        None,
        torch.ones(3, 40, dtype=torch.float16),
        torch.ones(3, 40, dtype=torch.uint8),
        torch.ones(40),
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"packing": "q3_k"}, "packing"),
        ({"codes": torch.ones(95, 40, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.ones(96, 40, dtype=torch.int32)}, "codes"),
        ({"codes": torch.ones(40, 96, dtype=torch.uint8).T}, "codes"),
        ({"codes": torch.ones(96 * 40, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.ones(96, 56, dtype=torch.uint8)}, "first_column"),
        ({"packing": "words", "codes": torch.ones(11, 40, dtype=torch.int32)}, "codes"),
        ({"packing": "words", "codes": torch.ones(13, 40, dtype=torch.int32)}, "codes"),
        ({"packing": "words"}, "codes"),
        ({"source_rows": ORDER.long()}, "source_rows"),
        ({"source_rows": ORDER[:95]}, "source_rows"),
        ({"source_rows": ORDER + 1}, "source_rows"),
        ({"source_rows": ORDER - 1}, "source_rows"),
        ({"scales": None}, "scales"),
        ({"scales": torch.ones(3, 40)}, "scales"),
        ({"scales": torch.ones(2, 40).half()}, "scales"),
        ({"scales": torch.ones(3, 16).half()}, "scales"),
        ({"scales": torch.ones(40, 3).half().T}, "scales"),
        ({"offsets": None}, "offsets"),
        ({"offsets": torch.ones(3, 40).half()}, "offsets"),
        ({"offsets": torch.ones(4, 40, dtype=torch.uint8)}, "offsets"),
        ({"bias": None}, "bias"),
        ({"bias": torch.ones(41)}, "bias"),
        ({"bias": torch.ones(40).half()}, "bias"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    table: OpTable, change: dict[str, Any], names: str
) -> None:
    w = table.new_linear(ZEROS)
    table.fill_linear(w, 0, good_columns())
    with pytest.raises(ValueError, match=names):
        table.fill_linear(w, 0, replace(good_columns(), **change))


@pytest.mark.parametrize(
    ("first", "last", "at"),
    [
        (0, 16, 8),
        (0, 16, -16),
        (0, 16, 32),
        (0, 16, 48),
        (0, 16, 2**62),
        (0, 8, 0),
        (0, 24, 0),
        (32, 40, 16),
    ],
)
def test_only_whole_panels_are_filled(
    table: OpTable, rng: torch.Generator, first: int, last: int, at: int
) -> None:
    matrix = make_matrix(rng, Shape(((4, 3, 32),), 40))
    w = table.new_linear(matrix.layout)
    with pytest.raises(ValueError, match="first_column"):
        table.fill_linear(w, at, columns_of(matrix, first, last))


def test_parts_that_the_layout_lacks_are_refused(table: OpTable) -> None:
    w = table.new_linear(LAYOUT)
    plain = replace(good_columns(), offsets=None, bias=None)
    table.fill_linear(w, 0, plain)
    with pytest.raises(ValueError, match="offsets"):
        table.fill_linear(w, 0, replace(plain, offsets=torch.ones(3, 40, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="bias"):
        table.fill_linear(w, 0, replace(plain, bias=torch.ones(40)))


def test_mixed_widths_have_no_source_rows_in_words(table: OpTable) -> None:
    w = table.new_linear(replace(LAYOUT, runs=runs((4, 1, 32), (8, 2, 32))))
    words = torch.zeros(20, 40, dtype=torch.int32)
    scales = torch.ones(3, 40).half()
    table.fill_linear(w, 0, GroupedColumns("words", words, None, scales))
    with pytest.raises(ValueError, match="source_rows"):
        table.fill_linear(w, 0, GroupedColumns("words", words, ORDER, scales))


@pytest.mark.parametrize(
    "change",
    [
        {"runs": runs((4, 6, 16))},
        {"runs": runs((5, 3, 32))},
        {"formula": "minimums"},
        {"scale_dtype": torch.float32},
    ],
    ids=str,
)
def test_ggml_blocks_need_their_own_layout(table: OpTable, change: dict[str, Any]) -> None:
    blocks = GroupedColumns("q4_0", torch.zeros(40, 3 * 18, dtype=torch.uint8))
    table.fill_linear(table.new_linear(LAYOUT), 0, blocks)
    with pytest.raises(ValueError, match="packing"):
        table.fill_linear(table.new_linear(replace(LAYOUT, **change)), 0, blocks)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"codes": torch.zeros(40, 3 * 20, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.zeros(40, 3 * 18, dtype=torch.int8)}, "codes|uint8"),
        ({"codes": torch.zeros(3 * 18, 40, dtype=torch.uint8).T}, "codes"),
        ({"scales": torch.ones(3, 40).half()}, "scales"),
        ({"source_rows": ORDER}, "source_rows|packing"),
    ],
)
def test_ggml_blocks_that_do_not_fit_are_refused(
    table: OpTable, change: dict[str, Any], names: str
) -> None:
    blocks = GroupedColumns("q4_0", torch.zeros(40, 3 * 18, dtype=torch.uint8))
    with pytest.raises(ValueError, match=names):
        table.fill_linear(table.new_linear(LAYOUT), 0, replace(blocks, **change))


def quantized(table: OpTable, rng: torch.Generator) -> PackedLinear:
    return filled(table, make_matrix(rng, Shape(((4, 3, 32),), 40)))


def test_parts_of_other_inputs_are_not_joined(table: OpTable, rng: torch.Generator) -> None:
    w = quantized(table, rng)
    with pytest.raises(ValueError, match=r"join|JoinedLinear"):
        table.join([w, table.new_linear(DenseLayout(8, 95, torch.float16))])
    with pytest.raises(ValueError, match=r"join|JoinedLinear"):
        table.join([])


@pytest.mark.parametrize("kind", ["quantized", "joined", "dense"])
def test_linears_refuse_other_activations(table: OpTable, rng: torch.Generator, kind: str) -> None:
    dense = table.new_linear(DenseLayout(40, 96, torch.float16))
    w = {
        "quantized": quantized(table, rng),
        "dense": dense,
        "joined": table.join([quantized(table, rng), dense]),
    }[kind]
    norm, width = RmsNorm(torch.ones(96), 1e-5), w.out_features
    for x in (
        torch.zeros(2, 95),
        torch.zeros(96),
        torch.zeros(2, 96).half(),
        torch.zeros(96, 2).T,
        torch.zeros(1, 96).expand(2, 96),
    ):
        with pytest.raises(ValueError, match=r"linear: x"):
            table.linear(x, w)
        with pytest.raises(ValueError, match=r"linear_add_: x"):
            table.linear_add_(x, w, torch.zeros(2, width))
        with pytest.raises(ValueError, match=r"norm_linear: x"):
            table.norm_linear(x, norm, w)
        with pytest.raises(ValueError, match=r"norm_gated_linear: x"):
            table.norm_gated_linear(x, norm, w, "silu")
    for bad in (torch.ones(95), torch.ones(96).half(), torch.ones(1, 96), torch.ones(192)[::2]):
        with pytest.raises(ValueError, match=r"norm_linear: norm"):
            table.norm_linear(torch.zeros(2, 96), RmsNorm(bad, 1e-5), w)
        with pytest.raises(ValueError, match=r"norm_gated_linear: norm"):
            table.norm_gated_linear(torch.zeros(2, 96), RmsNorm(bad, 1e-5), w, "silu")
    for residual in (
        torch.zeros(2, width + 1),
        torch.zeros(3, width),
        torch.zeros(2, width).half(),
        torch.zeros(width, 2).T,
    ):
        with pytest.raises(ValueError, match=r"linear_add_: residual"):
            table.linear_add_(torch.zeros(2, 96), w, residual)


def test_gates_need_two_halves_and_a_known_kind(table: OpTable, rng: torch.Generator) -> None:
    x, norm = torch.zeros(2, 96), RmsNorm(torch.ones(96), 1e-5)
    odd = filled(table, make_matrix(rng, Shape(((4, 3, 32),), 41)))
    with pytest.raises(ValueError, match="norm_gated_linear"):
        table.norm_gated_linear(x, norm, odd, "silu")
    with pytest.raises(ValueError, match="relu"):
        table.norm_gated_linear(x, norm, quantized(table, rng), "relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[0, 40], [-1], [2**40]], ids=str)
def test_embedding_of_a_quantized_matrix_refuses_ids_out_of_range(
    table: OpTable, rng: torch.Generator, ids: list[int]
) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        table.embedding(torch.tensor(ids), quantized(table, rng))


def test_compiled_weights_refuse_what_would_leave_their_memory() -> None:
    w = exl_kernels.QuantLinear(16, 32, [(4, 1, 32)], None, torch.float16, "middle")
    codes, scales = torch.zeros(32, 16, dtype=torch.uint8), torch.ones(1, 16).half()

    with pytest.raises(ValueError, match="first_column"):
        w.fill(2**63 - 16, "bytes", codes, None, scales, None, None)
    with pytest.raises(ValueError, match="parts"):
        exl_kernels.JoinedLinear([None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="runs"):
        runs_without_rows: Any = [(4, 1)]
        exl_kernels.QuantLinear(16, 32, runs_without_rows, None, torch.float16, "middle")


def test_a_compiled_batch_keeps_its_own_angles() -> None:
    """The memory of a tensor may be freed while the batch exists."""
    table = get_table("cpu", threads=1)
    zeros = torch.zeros(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    caches = [torch.zeros(1, 1, 4, 8) for _ in range(2)]
    qkv = torch.arange(24.0)[None]
    results = []
    for is_taken in (False, True):
        cos, sin = torch.full((1, 4), 0.6), torch.full((1, 4), 0.8)
        batch = table.attention_batch(
            AttentionRows(zeros[None], starts, zeros),
            zeros.long(),
            cos,
            sin,
            num_pages=1,
            page_size=4,
        )
        if is_taken:
            cos.fill_(torch.nan)
            sin.fill_(torch.nan)
        turned = qkv.clone()
        table.attend_(turned, batch, CacheLayer(*caches), Scoring(1.0))
        results.append((turned[:, :8].clone(), caches[0].clone()))

    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
