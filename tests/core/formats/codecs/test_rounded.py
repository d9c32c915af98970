"""Matrices rounded to 4 bits at load: the bound of their error, odd sizes, values out of range."""

from __future__ import annotations

import pytest
import torch

from exl_core.errors import WeightValueError
from exl_core.formats.codecs.rounded.matrix import RoundedMatrix, rounded
from exl_core.formats.codecs.runtime import Move
from exl_core.ops.backends.reference.table import ReferenceTable


def dequantized(values: torch.Tensor) -> torch.Tensor:
    """The matrix as the reference table reads it, [columns, k]."""
    table = ReferenceTable(threads=1)
    matrix = RoundedMatrix(tuple(values.shape), lambda first, last, *_: values[first:last], "m")
    packed = table.new_linear(matrix.layout)
    table.fill_linear(packed, 0, matrix.columns(0, len(values)))
    return table.embedding(torch.arange(len(values)), packed)


@pytest.mark.parametrize("k", [64, 96, 200, 1024])
def test_no_value_moves_by_more_than_half_a_step(k: int) -> None:
    torch.manual_seed(k)
    values = torch.randn(32, k) * torch.logspace(-3, 2, 32)[:, None]
    found = dequantized(values)
    for first in range(0, k, 64):
        group, own = values[:, first : first + 64], found[:, first : first + 64]
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        step = (high - low) / 15
        # The scale and the minimum are float16: 15 steps of 2^-11 each, and one of the minimum.
        slack = (15 * step + low.abs()) * 2.0**-11 + 2.0**-24 * 16
        assert bool(((own - group).abs() <= step / 2 + slack).all())


def test_equal_values_are_kept_and_extremes_are_hit() -> None:
    values = torch.full((32, 64), 0.375)
    assert torch.equal(dequantized(values), values)
    values[:, ::2] = -0.375
    assert torch.equal(dequantized(values)[:, ::2], values[:, ::2]), "the minimum is exact"
    assert (dequantized(values) - values).abs().max() <= 0.75 * 2.0**-11


def test_values_beyond_float16_are_refused() -> None:
    values = torch.zeros(32, 64)
    values[3, 5] = -1e6
    with pytest.raises(WeightValueError, match=r"m: .*too large for 4-bit.*1000000"):
        rounded(values, "m")


def test_rows_are_read_in_the_wanted_range_only() -> None:
    asked: list[tuple[int, int]] = []

    def read(first: int, last: int, _: torch.dtype, __: Move) -> torch.Tensor:
        asked.append((first, last))
        return torch.zeros(last - first, 64)

    RoundedMatrix((96, 64), read, "m").columns(32, 64)
    assert asked == [(32, 64)]
