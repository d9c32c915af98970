"""Slices of matrices: the ranks' parts put together are the whole matrix, for every codec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from exl_core.formats.codecs.awq import layout as awq
from exl_core.formats.codecs.awq.matrix import AwqMatrix
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2.matrix import Exl2Matrix
from exl_core.formats.codecs.fp8 import layout as fp8
from exl_core.formats.codecs.fp8.matrix import Fp8Matrix
from exl_core.formats.codecs.ggml import matrix as ggml
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.formats.codecs.gptq.matrix import GptqMatrix
from exl_core.formats.codecs.runtime import Move, RuntimeMatrix, stay
from exl_core.ops.open import get_table
from exl_core.ops.weights import (
    DenseColumns,
    DenseLayout,
    GroupedColumns,
    GroupedLayout,
    WeightLayout,
)
from exl_core.parallel.plan import Rank, share
from exl_core.parallel.slices import SlicedMatrix, deal, slice_rows
from support.gguf_models import random_blocks
from support.quantized import random_awq, random_exl2, random_fp8, random_gptq
from support.runtime_form import evaluate

COLUMNS = 96


class Dense:
    """Dense weights [COLUMNS, rows]."""

    def __init__(self, rows: int) -> None:
        self.layout: WeightLayout = DenseLayout(COLUMNS, rows, torch.float16)
        generator = torch.Generator().manual_seed(rows)
        self.weight = torch.randn(COLUMNS, rows, generator=generator).half()

    def columns(self, first: int, last: int, move: Move = stay) -> DenseColumns:
        return DenseColumns(move(self.weight[first:last]))

    def dense(self, first: int, last: int) -> Tensor:
        return self.weight[first:last]


class Blocks:
    """Random GGUF blocks."""

    def __init__(self, kind: GGMLQuantizationType, rows: int) -> None:
        self.kind = kind
        self.raw = torch.from_numpy(random_blocks(kind, COLUMNS, rows))
        layout = ggml.layout_of(kind, COLUMNS, rows)
        assert layout is not None
        self.layout: GroupedLayout = layout

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        return ggml.columns_of(move(self.raw[first:last]), self.kind)

    def dense(self, first: int, last: int) -> Tensor:
        return torch.from_numpy(evaluate(self).T[first:last])


def exl2_matrix(groups: list[tuple[int, int]]) -> RuntimeMatrix:
    layer = random_exl2(3, groups, COLUMNS)
    return Exl2Matrix(exl2.check(layer.parts, "test"), COLUMNS)


def gptq_matrix(bits: int, group: int, rows: int, *, act_order: bool) -> RuntimeMatrix:
    layer = random_gptq(4, bits, group, rows=rows, columns=COLUMNS, has_act_order=act_order)
    settings = gptq.parse_settings(layer.config(), "test")
    return GptqMatrix(gptq.check(layer.parts, settings, "test"), COLUMNS)


def awq_matrix(rows: int) -> RuntimeMatrix:
    layer = random_awq(5, 32, rows=rows, columns=COLUMNS)
    settings = awq.parse_settings(layer.config(), "test")
    return AwqMatrix(awq.check(layer.parts, settings, "test"), COLUMNS)


def fp8_matrix(rows: int) -> RuntimeMatrix:
    layer = random_fp8(6, (48, 64), rows=rows, columns=COLUMNS)
    return Fp8Matrix(fp8.check(layer.parts, (48, 64), "test"), COLUMNS, where="test")


KINDS = GGMLQuantizationType
MATRICES: dict[str, Callable[[], RuntimeMatrix]] = {
    "dense": lambda: Dense(111),
    "exl2": lambda: exl2_matrix([(8, 32), (6, 64), (5, 32), (4, 32), (4, 32), (3, 64), (2, 32)]),
    "exl2 one width": lambda: exl2_matrix([(4, 64)] * 5),
    "gptq": lambda: gptq_matrix(4, 128, 288, act_order=False),
    "gptq act-order": lambda: gptq_matrix(4, 32, 288, act_order=True),
    "gptq 3 bits act-order": lambda: gptq_matrix(3, 64, 224, act_order=True),
    "gptq one group": lambda: gptq_matrix(8, -1, 160, act_order=False),
    "awq": lambda: awq_matrix(224),
    "fp8": lambda: fp8_matrix(200),
    **{
        kind.name: partial(Blocks, kind, 768)
        for kind in (
            *(KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1, KINDS.Q8_0, KINDS.Q4_K, KINDS.Q5_K),
            *(KINDS.IQ4_NL, KINDS.IQ4_XS, KINDS.MXFP4),
        )
    },
}


@pytest.fixture(params=list(MATRICES), scope="module")
def matrix(request: pytest.FixtureRequest) -> RuntimeMatrix:
    return MATRICES[request.param]()


def dealt(matrix: RuntimeMatrix, ranks: int) -> list[Tensor]:
    rows = matrix.layout.in_features
    return deal(matrix.layout, [len(share(rows, Rank(index, ranks))) for index in range(ranks)])


@pytest.mark.parametrize("ranks", [2, 3])
def test_row_slices_have_the_values_of_their_rows(matrix: RuntimeMatrix, ranks: int) -> None:
    whole = evaluate(matrix)
    features = dealt(matrix, ranks)
    assert sorted(torch.cat(features).tolist()) == list(range(len(whole)))

    for own in features:
        cut = SlicedMatrix(matrix, features=own)
        np.testing.assert_array_equal(evaluate(cut), whole[own.numpy()])
        np.testing.assert_array_equal(cut.dense(32, 70), matrix.dense(32, 70)[:, own])


@pytest.mark.parametrize(
    "matrix",
    ["exl2", "exl2 one width", "gptq", "gptq one group"],
    indirect=True,
)
def test_row_slices_move_their_own_words_only(matrix: RuntimeMatrix) -> None:
    assert isinstance(matrix.layout, GroupedLayout)
    for own in dealt(matrix, 2):
        cut, moved = SlicedMatrix(matrix, features=own), [0]

        def move(tensor: Tensor, moved: list[int] = moved) -> Tensor:
            moved.append(tensor.nbytes)
            return tensor

        columns = cut.columns(0, COLUMNS, move)
        assert isinstance(columns, GroupedColumns)
        assert columns.packing == "words"
        assert isinstance(cut.layout, GroupedLayout)
        bits = sum(run.bits * run.groups * run.rows for run in cut.layout.runs)
        assert sum(moved) == bits * COLUMNS // 8


@pytest.mark.parametrize("odd", [1, 3])
def test_slices_of_any_features(matrix: RuntimeMatrix, odd: int) -> None:
    """Heads of any size: no range of a group, and none of a block."""
    whole = evaluate(matrix)
    own = torch.arange(odd * 7, len(whole) - 5)
    np.testing.assert_array_equal(evaluate(SlicedMatrix(matrix, features=own)), whole[own])


def test_column_slices_have_the_values_of_their_columns(matrix: RuntimeMatrix) -> None:
    whole = evaluate(matrix)
    for own in (torch.arange(16, 80), torch.tensor([0, 3, 31, 32, 33, 64, 90, 95])):
        cut = SlicedMatrix(matrix, columns=own)
        np.testing.assert_array_equal(evaluate(cut), whole[:, own])
        np.testing.assert_array_equal(cut.dense(0, len(own)), matrix.dense(0, COLUMNS)[own])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_products_of_the_ranks_add_up(matrix: RuntimeMatrix, ranks: int, backend: str) -> None:
    """Each rank packs its rows and multiplies its part of the inputs."""
    table = get_table(backend, threads=1)
    whole = torch.from_numpy(evaluate(matrix))
    x = torch.randn(3, len(whole), generator=torch.Generator().manual_seed(1))

    total = torch.zeros(3, COLUMNS, dtype=torch.float64)
    for own in dealt(matrix, ranks):
        cut = SlicedMatrix(matrix, features=own)
        packed = table.new_linear(cut.layout)
        for first in range(0, COLUMNS, 32):
            table.fill_linear(packed, first, cut.columns(first, first + 32))
        total += table.linear(x[:, own].contiguous(), packed).double()

    exact = x.double() @ whole
    scale = (x.double().abs() @ whole.abs()).clamp(1e-30)
    # The CPU rounds x to 16 bits relative to the largest value of a span of stored rows.
    assert float(((total - exact).abs() / scale).max()) < (1e-6 if backend == "reference" else 2e-3)


def test_mixed_widths_are_dealt_evenly() -> None:
    matrix = exl2_matrix([(8, 32)] * 4 + [(4, 32)] * 9 + [(2, 32)] * 8)
    stored_bits = []
    for own in dealt(matrix, 2):
        layout = slice_rows(matrix.layout, own).layout
        assert isinstance(layout, GroupedLayout)
        stored_bits.append(sum(run.bits * run.groups * run.rows for run in layout.runs))
    assert max(stored_bits) - min(stored_bits) <= 8 * 32


def test_no_group_is_cut_where_groups_suffice() -> None:
    matrix = gptq_matrix(4, 32, 256, act_order=True)
    for own in dealt(matrix, 2):
        layout = slice_rows(matrix.layout, own).layout
        assert isinstance(layout, GroupedLayout)
        assert [(run.groups, run.rows) for run in layout.runs] == [(4, 32)]


@pytest.mark.parametrize(
    ("size", "ranks", "expected"),
    [
        (29568, 2, [14784, 14784]),  # 231 groups of 128
        (96, 2, [32, 64]),
        (1536, 3, [512, 512, 512]),
        (33, 3, [8, 16, 9]),
        (3, 3, [1, 1, 1]),
        (100, 2, [64, 36]),
    ],
)
def test_shares_cover_every_row_once(size: int, ranks: int, expected: list[int]) -> None:
    found = [share(size, Rank(index, ranks)) for index in range(ranks)]
    assert [len(one) for one in found] == expected
    assert [row for one in found for row in one] == list(range(size))
