"""Trellis codes of single matrices: nearest rings, feedback, scales, padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from exl_core.convert import ldlq
from exl_core.convert.ldlq import LEAST_WEIGHT, TrellisQuantizer, TrellisWeights
from exl_core.formats.codecs.exl3 import layout as exl3
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
        for one in (None, importance)
    )

    # The errors of a column follow the square of its scale, 1 / sqrt(importance): by arithmetic the
    # weighted sum falls to mean(sqrt(i))^2 / mean(i), with LEAST_WEIGHT added to i.
    added = importance / importance.mean() + LEAST_WEIGHT
    expected = float(added.sqrt().mean().square() / added.mean())
    gain = float((importance * weighted).sum() / (importance * plain).sum())
    assert gain == pytest.approx(expected, rel=0.15)
    assert gain < 0.75


def test_importance_that_is_not_usable_changes_nothing() -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(7))
    quantizer = TrellisQuantizer(torch.eye(128), get_table("cpu", threads=2))
    plain, zero, infinite = (
        quantizer.quantize(weight, 2, "mul1", one).linear.trellis
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


def correlated(features: int, count: int, generator: torch.Generator) -> Tensor:
    """Mean products of `count` random vectors that are close to a space of few dimensions."""
    mixed = torch.randn(features // 8, features, generator=generator)
    vectors = torch.randn(count, features // 8, generator=generator) @ mixed
    vectors += 0.5 * torch.randn(count, features, generator=generator)
    return vectors.T @ vectors / count


def blocks_of(hessian: Tensor) -> Tensor:
    size = ldlq.HADAMARD
    return torch.stack([one[:, i * size :][:, :size] for i, one in enumerate(hessian.split(size))])


@pytest.mark.parametrize(("rows", "columns"), [(128, 384), (384, 128)])  # waves of both shapes
def test_the_search_in_waves_is_the_search_tile_by_tile(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(8)
    ops = get_table("cpu", threads=2)
    target = torch.randn(rows, columns, generator=generator)
    feedback = torch.randn(rows, rows, generator=generator) * 0.1
    spreading = torch.randn(columns // 128, 128, 128, generator=generator) * 0.1
    lower = torch.block_diag(*[torch.ones(16, 16)] * (rows // 16))  # blocks of the diagonal
    feedback = feedback.tril() * (1 - lower)
    inner = torch.block_diag(*[torch.ones(16, 16)] * 8)
    spreading = spreading.tril() * (1 - inner) + torch.eye(128)

    words, values = TrellisQuantizer(torch.eye(rows), ops)._search_both(
        target, feedback, spreading, 2.5, "mul1"
    )

    left, right = feedback + torch.eye(rows), torch.block_diag(*spreading)
    coded = torch.zeros_like(target)
    for row in range(rows - 16, -1, -16):
        for column in range(columns - 16, -1, -16):
            place = slice(row, row + 16), slice(column, column + 16)
            wanted = (target + left.T @ ((target - values) * coded) @ right)[place]
            nearest = ldlq.encode_tiles(wanted[None], 2.5, "mul1", ops).values[0]
            found = values[place] - wanted
            assert found.norm() <= (nearest - wanted).norm() * (1 + 1e-5)  # targets are rounded
            decoded = exl3.decode_tiles(words[row // 16, column // 16][None, None], "mul1")
            assert torch.equal(decoded, values[place])
            coded[place] = 1


def test_columns_make_up_for_each_other() -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(128, 200, generator=generator)
    hessian = correlated(128, 2000, generator)
    full = correlated(256, 4000, generator)
    full[200:] = full[:, 200:] = 0  # outputs that do not exist
    outputs = blocks_of(full)
    importance = full.diagonal()[:200]
    quantizer = TrellisQuantizer(hessian, get_table("cpu", threads=2))

    def loss(given: Tensor | None) -> float:
        error = quantizer.quantize(weight, 3, "mul1", importance, given).weight - weight
        known = torch.block_diag(*outputs)[:200, :200]
        return float(((hessian @ error) * (error @ known)).sum())

    gain = loss(outputs) / loss(None)
    # By arithmetic: the share of the errors that remains in rotated form, with the damping.
    svh = ldlq.initial_scales(
        torch.nn.functional.pad(weight, (0, 56)).double(),
        ldlq.column_importance(importance, 256).double(),
        0,
    )[1]
    rotated = ldlq.rotated_outputs(outputs.double(), svh)
    unit = torch.linalg.inv(ldlq.output_feedback(outputs.double(), svh))
    expected = float((unit @ rotated @ unit.mT).diagonal(0, 1, 2).sum())
    expected /= float(rotated.diagonal(0, 1, 2).sum())
    assert expected < 0.6
    assert gain == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("fill", [0.0, torch.nan, torch.inf])
def test_unusable_products_of_outputs_change_nothing(fill: float) -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(7))
    quantizer = TrellisQuantizer(torch.eye(128), get_table("cpu", threads=2))
    plain = quantizer.quantize(weight, 2, "mul1", None)
    given = quantizer.quantize(weight, 2, "mul1", None, torch.full((1, 128, 128), fill))
    assert torch.equal(plain.linear.trellis, given.linear.trellis)
    torch.testing.assert_close(plain.weight, given.weight)
