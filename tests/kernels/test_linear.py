"""Dense linears, and embeddings that share their weights."""

from __future__ import annotations

import pytest
import torch
from kernel_support import UNIT, assert_near, is_gpu, normal, packed, strided_rows
from quant_support import GPU_BOUND

from exl_core.ops.table import OpTable
from exl_core.ops.weights import DenseColumns, DenseLayout
from support.profiles import first_by_default

WEIGHT_TYPES = [torch.float32, torch.float16, torch.bfloat16]
# 1: decode; 3: one register tile; 17, 33: several tiles; 130: uneven tiles; 300: two row blocks.
ROWS = [1, 3, 17, 130, 14, 33, 300]
SHAPES = [(16, 8), (1, 1), (37, 131), (96, 256), (72, 577)]


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize("rows", first_by_default(ROWS, 4), ids=lambda m: f"m{m}")
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_matches_float64_within_k_roundings(
    *, table: OpTable, rng: torch.Generator, rows: int, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, bias = normal(rng, n, k).to(dtype), normal(rng, n)
    if is_gpu(table):  # it stores weights as float16
        weight = weight.half().to(dtype)
    x = strided_rows(rng, rows, k)

    y = table.linear(x, packed(table, weight, bias))

    exact = x.double() @ weight.double().T + bias
    magnitude = x.double().abs() @ weight.double().abs().T + bias.abs()
    assert y.dtype == torch.float32 and y.is_contiguous()
    assert_near(table, y, exact, (k + 2) * UNIT * magnitude, GPU_BOUND)


def test_linear_equals_torch_on_whole_numbers(table: OpTable, rng: torch.Generator) -> None:
    """Products and sums of small integers are exact, so that any wrong index shows."""
    weight = torch.randint(-8, 9, (45, 70), generator=rng).half()
    x = torch.randint(-8, 9, (29, 70), generator=rng).float()

    y = table.linear(x, packed(table, weight))

    assert torch.equal(y, torch.nn.functional.linear(x, weight.float()))


def test_rows_filled_in_parts_are_in_their_place(cpu_table: OpTable, rng: torch.Generator) -> None:
    """A fused projection is filled part by part, and parts need not end on a panel."""
    weight, bias = normal(rng, 70, 19).bfloat16(), normal(rng, 70)
    w = cpu_table.new_linear(DenseLayout(70, 19, torch.bfloat16, has_bias=True))
    for start, end in ((33, 50), (0, 5), (50, 70), (5, 33)):
        cpu_table.fill_linear(w, start, DenseColumns(weight[start:end], bias[start:end]))
    x = normal(rng, 4, 19)

    assert torch.equal(cpu_table.linear(x, w), cpu_table.linear(x, packed(cpu_table, weight, bias)))
    assert torch.equal(cpu_table.embedding(torch.arange(70), w), weight.float())


def test_packed_linear_reports_its_sizes(cpu_table: OpTable) -> None:
    w = cpu_table.new_linear(DenseLayout(48, 10, torch.float16))

    assert (w.out_features, w.in_features) == (48, 10)
    assert w.size_bytes >= 48 * 10 * 2
    assert w.size_bytes < 48 * 10 * 2 + 64


def test_no_rows_give_no_rows(table: OpTable, rng: torch.Generator) -> None:
    w = packed(table, normal(rng, 20, 8))

    assert table.linear(torch.empty(0, 8), w).shape == (0, 20)
    assert table.embedding(torch.empty(0, dtype=torch.int64), w).shape == (0, 8)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_nan_in_a_row_stays_in_that_row(table: OpTable, rng: torch.Generator, rows: int) -> None:
    x = normal(rng, rows, 50)
    x[rows - 1, 31] = torch.nan

    y = table.linear(x, packed(table, normal(rng, 40, 50).half()))

    assert y[rows - 1].isnan().all()
    assert not y[: rows - 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern_converts_exactly(cpu_table: OpTable, dtype: torch.dtype) -> None:
    """Subnormals, infinities and NaNs included."""
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(256, 256)

    rows = cpu_table.embedding(torch.arange(256), packed(cpu_table, weight))

    expected = weight.float()
    assert torch.equal(rows.isnan(), expected.isnan())
    assert torch.equal(rows.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("rows", [1, 40])
def test_subnormal_weights_are_not_flushed(table: OpTable, rows: int) -> None:
    weight = torch.full((16, 64), 2.0**-24, dtype=torch.float16)

    y = table.linear(torch.ones(rows, 64), packed(table, weight))

    assert torch.equal(y, torch.full((rows, 16), 64 * 2.0**-24))


def test_embedding_reads_the_rows_of_the_linear(table: OpTable, rng: torch.Generator) -> None:
    weight = normal(rng, 53, 77).half()
    ids = torch.tensor([52, 0, 17, 52, 16, 15])

    assert torch.equal(table.embedding(ids, packed(table, weight)), weight[ids].float())
