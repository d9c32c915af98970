"""Linears of trellis codes: every rate and codebook, against the exact weights in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_support import normal
from torch import Tensor

from exl_core.ops.backends.reference.linear import ReferenceLinearOps
from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable
from exl_core.ops.weights import CODEBOOKS, Codebook, TrellisLayout
from support.trellis import RATES, Exl3Layer, random_exl3

KINDS = [(rate, book) for book in CODEBOOKS for rate in RATES if rate % 1 == 0 or book == "mul1"]
ROWS = (1, 2, 3, 7, 8, 9, 33)  # 9: a work item is a range of rows
TOLERANCE = 1e-3
"""Relative to the RMS of the outputs. mul1 leaves out a rounding of 2.1e-4."""


def filled(
    table: OpTable, layer: Exl3Layer, layout: TrellisLayout, bias: Tensor | None = None
) -> PackedLinear:
    w = table.new_linear(replace(layout, has_bias=bias is not None))
    table.fill_linear(w, 0, layer.columns(bias))
    return w


def assert_near(y: Tensor, exact: Tensor) -> None:
    error = (y.double() - exact).square().mean().sqrt()
    assert error <= TOLERANCE * exact.square().mean().sqrt()


@pytest.mark.parametrize(("rate", "codebook"), KINDS)
def test_trellis_linear_is_near_the_exact_product(
    cpu_table: OpTable, rng: torch.Generator, rate: float, codebook: Codebook
) -> None:
    layer = random_exl3(int(10 * rate), rate, codebook, rows=256, columns=256)
    w = filled(cpu_table, layer, layer.layout(200, 170))
    dense = layer.dense()[:170, :200]
    for rows in ROWS:
        x = normal(rng, rows, 170)
        assert_near(cpu_table.linear(x, w), x.double() @ dense)


def test_parts_of_a_matrix_with_biases_are_joined(cpu_table: OpTable, rng: torch.Generator) -> None:
    first, second = random_exl3(1, 3, rows=256), random_exl3(2, 2.5, rows=384, columns=256)
    bias = normal(rng, 40)
    one = filled(cpu_table, first, replace(first.layout(100, 200), first_in=30))
    other = filled(
        cpu_table, second, replace(second.layout(40, 200), first_out=100, first_in=100), bias
    )
    joined = cpu_table.join([one, other])
    for rows in ROWS:
        x, y = normal(rng, rows, 200), normal(rng, rows, 140)
        exact = torch.cat(
            [
                x.double() @ first.dense()[30:230, :100],
                x.double() @ second.dense()[100:300, 100:140] + bias.double(),
            ],
            1,
        )
        assert_near(cpu_table.linear(x, joined), exact)
        assert_near(cpu_table.linear_add_(x, joined, y.clone()), y.double() + exact)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_row_has_the_same_bits_in_any_batch(
    kernels: OpTable, rng: torch.Generator, codebook: Codebook
) -> None:
    layer = random_exl3(4, 4, codebook, rows=384, columns=256)
    w = filled(kernels, layer, layer.layout(256, 384))
    x = normal(rng, 300, 384)
    whole = kernels.linear(x, w)
    for first, last in ((0, 1), (17, 18), (5, 8), (10, 30)):
        assert torch.equal(kernels.linear(x[first:last], w), whole[first:last])


def test_a_nan_reaches_every_output_of_its_row(cpu_table: OpTable, rng: torch.Generator) -> None:
    layer = random_exl3(4, 4)
    w = filled(cpu_table, layer, layer.layout(128, 128))
    x = normal(rng, 3, 128)
    x[1, 5] = float("nan")
    y = cpu_table.linear(x, w)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_the_reference_is_exact(rng: torch.Generator) -> None:
    layer = random_exl3(4, 3.5)
    w = ReferenceLinearOps.new_linear(layer.layout(128, 128))
    ReferenceLinearOps.fill_linear(w, 0, layer.columns())
    x = normal(rng, 2, 128)
    exact = x.double() @ layer.dense()
    assert (ReferenceLinearOps.linear(x, w).double() - exact).abs().max() < 1e-5
