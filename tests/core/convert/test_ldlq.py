"""Trellis codes of single matrices: nearest rings, feedback, scales, padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from exl_core.convert import outputs
from exl_core.convert.ldlq import TrellisQuantizer, TrellisWeights
from exl_core.convert.outputs import LEAST_WEIGHT, output_hessian
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.exl3.matrix import stored_size
from exl_core.ops.open import get_table
from exl_core.ops.weights import Codebook


def quantized(weight: Tensor, hessian: Tensor, rate: float) -> TrellisWeights:
    return TrellisQuantizer(hessian, get_table("cpu", threads=2)).quantize(weight, rate, "mul1")


def test_padded_columns_and_columns_of_zeros_are_exactly_zero() -> None:
    weight = torch.randn(16, 20, generator=torch.Generator().manual_seed(1))
    weight[:, 7] = 0

    result = quantized(weight, torch.eye(16), 4)

    assert result.linear.trellis.shape == (8, 8, 64)
    dense = exl3.dequantize(result.linear, 0, 128)
    assert not dense[:, 20:].any()
    assert not dense[:, 7].any()
    assert torch.equal(dense[:16, :20], result.weight)
    assert (result.weight - weight).norm() < 0.2 * weight.norm()


def relative_error(result: Tensor, weight: Tensor, hessian: Tensor) -> float:
    error, source = (result - weight).double(), weight.double()
    return float((error * (hessian.double() @ error)).sum()) / float(
        (source * (hessian.double() @ source)).sum()
    )


@pytest.mark.parametrize(("rate", "codebook"), [(2, "mul1"), (3, "mul1"), (3, "mcg"), (3, "3inst")])
def test_errors_are_smaller_than_those_of_exllamav3(
    shared_dir: Path, rate: float, codebook: Codebook
) -> None:
    case = f"{codebook}.{rate:g}"
    with safe_open(shared_dir / "golden" / "exl3_reference.safetensors", "pt") as file:
        weight, hessian = (file.get_tensor(f"{case}.{name}") for name in ("weight", "hessian"))
        parts = {
            name: file.get_tensor(f"{case}.{name}")
            for name in exl3.PARTS
            if f"{case}.{name}" in file.keys()  # noqa: SIM118 - no mapping
        }
    ops = get_table("cpu", threads=2)

    result = TrellisQuantizer(hessian, ops).quantize(weight.float(), rate, codebook)

    other = exl3.dequantize(exl3.check(parts, case), 0, weight.shape[1])
    error = relative_error(result.weight, weight, hessian)
    assert error == pytest.approx(result.error, rel=1e-6)
    assert error < 0.9 * relative_error(other, weight, hessian)


def test_feedback_moves_errors_where_the_inputs_have_no_energy() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(128, 128, generator=generator)
    inputs = torch.randn(512, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    inputs += 0.3 * torch.randn(512, 128, generator=generator)
    hessian = inputs.T @ inputs / 512

    aware, blind = quantized(weight, hessian, 3), quantized(weight, torch.eye(128), 3)

    assert aware.error < 0.5 * relative_error(blind.weight, weight, hessian)


def test_important_columns_get_smaller_errors() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(128, 256, generator=generator)
    importance = torch.rand(256, generator=generator).pow(6)  # a few large ones
    quantizer = TrellisQuantizer(torch.eye(128), get_table("cpu", threads=2))

    plain, weighted = (
        (quantizer.quantize(weight, 3, "mul1", one).weight - weight).square().mean(0)
        for one in (None, output_hessian(importance, None, 256))
    )

    # The errors of a column follow the square of its scale, 1 / sqrt(importance): by arithmetic the
    # weighted sum falls to mean(sqrt(i))^2 / mean(i), with LEAST_WEIGHT added to i.
    added = importance / importance.mean() + LEAST_WEIGHT
    expected = float(added.sqrt().mean().square() / added.mean())
    gain = float((importance * weighted).sum() / (importance * plain).sum())
    assert gain == pytest.approx(expected, rel=0.15)
    assert gain < 0.75


def related(size: int, sources: int, seed: int) -> Tensor:
    """Second moments [size, size] of features that depend on fewer sources."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(sources, size, generator=generator)
    x = torch.randn(2000, sources, generator=generator) @ mixed
    x += 0.5 * torch.randn(2000, size, generator=generator)
    return x.T @ x / len(x)


@pytest.mark.parametrize(("columns", "block"), [(128, 128), (300, 256), (256, 2048)])
def test_errors_of_related_outputs_make_up_for_each_other(
    monkeypatch: pytest.MonkeyPatch, columns: int, block: int
) -> None:
    monkeypatch.setattr(outputs, "BLOCK", block)
    weight = torch.randn(200, columns, generator=torch.Generator().manual_seed(8))
    hessian, moments = related(200, 30, 9), related(columns, 20, 10)
    width, squares = outputs.block_width(columns), moments.diagonal()
    correlation = torch.zeros(-(-columns // width), width, width)
    for index, one in enumerate(correlation):
        span = slice(index * width, min(columns, (index + 1) * width))
        size = squares[span].sqrt()
        one[: len(size), : len(size)] = moments[span, span] / size[:, None] / size
    of_blocks = torch.block_diag(*correlation)[:columns, :columns]
    of_blocks = of_blocks * squares.sqrt() * squares.sqrt()[:, None]
    quantizer = TrellisQuantizer(hessian, get_table("cpu", threads=2))

    costs = []
    for pairs in (None, correlation.half()):
        weights = output_hessian(squares, pairs, stored_size(columns))
        result = quantizer.quantize(weight, 2, "mul1", weights)
        error = result.weight - weight
        costs.append(float(((error.T @ hessian @ error) * of_blocks).sum()))
        dense = exl3.dequantize(result.linear, 0, stored_size(columns))
        torch.testing.assert_close(dense[:200, :columns], result.weight)

    plain, aware = costs
    assert aware < 0.6 * plain


def test_importance_that_is_not_usable_changes_nothing() -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(7))
    quantizer = TrellisQuantizer(torch.eye(128), get_table("cpu", threads=2))
    plain, zero, infinite = (
        quantizer.quantize(weight, 2, "mul1", output_hessian(one, None, 128)).linear.trellis
        for one in (None, torch.zeros(128), torch.full((128,), torch.inf))
    )
    assert torch.equal(plain, zero)
    assert torch.equal(plain, infinite)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_an_unusable_hessian_gives_the_nearest_codes(value: float) -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))
    result = quantized(weight, torch.full((128, 128), value), 4)
    assert (result.weight - weight).norm() < 0.1 * weight.norm()


def test_a_seed_gives_the_same_bytes_again_and_another_other_signs() -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(4))
    ops = get_table("cpu", threads=2)
    first, again, other = (
        TrellisQuantizer(torch.eye(128), ops, seed=seed).quantize(weight, 2, "mul1").linear
        for seed in (5, 5, 6)
    )
    assert torch.equal(first.trellis, again.trellis)
    assert torch.equal(first.suh, again.suh)
    assert not torch.equal(first.suh.sign(), other.suh.sign())
