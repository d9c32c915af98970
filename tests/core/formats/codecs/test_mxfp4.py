"""MXFP4 tensors of safetensors files against transformers, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from exl_core.errors import ModelError, WeightValueError
from exl_core.formats.codecs.mxfp4 import layout as mxfp4
from exl_core.formats.codecs.mxfp4.matrix import Mxfp4Matrix
from support.mxfp4 import dequantized, gguf_blocks
from support.runtime_form import evaluate

SHAPE = (3, 48, 4)  # matrices, rows, blocks of 32 columns


def parts_of(rng: torch.Generator) -> dict[str, Tensor]:
    """Random codes with all exponents that are numbers."""
    blocks = torch.randint(0, 256, (*SHAPE, 16), generator=rng).to(torch.uint8)
    scales = torch.randint(0, 255, SHAPE, generator=rng).to(torch.uint8)
    scales.view(-1)[:4] = torch.tensor([0, 1, 2, 252], dtype=torch.uint8)
    return {"blocks": blocks, "scales": scales}


@pytest.fixture
def parts() -> dict[str, Tensor]:
    return parts_of(torch.Generator().manual_seed(3))


def test_values_are_those_of_transformers(parts: dict[str, Tensor]) -> None:
    parts["scales"].clamp_(min=3)  # its bfloat16 loses subnormal numbers
    parts["scales"].clamp_(max=250)  # and overflows
    expected = convert_moe_packed_tensors(*parts.values(), dtype=torch.float32)  # [3, in, out]
    linear = mxfp4.check(parts, "test")
    got = mxfp4.dequantize(linear, torch.arange(linear.out_features))
    assert torch.equal(got.view(expected.transpose(1, 2).shape), expected.transpose(1, 2))


def test_values_are_those_of_the_gguf_package(parts: dict[str, Tensor]) -> None:
    parts["scales"].clamp_(max=250)
    expected = torch.from_numpy(dequantized(gguf_blocks(**parts)))
    linear = mxfp4.check(parts, "test")
    got = mxfp4.dequantize(linear, torch.arange(linear.out_features))
    assert torch.equal(got, expected.view(got.shape))


def test_the_run_time_form_has_the_same_values(parts: dict[str, Tensor]) -> None:
    linear = mxfp4.check(parts, "test")
    turns = torch.arange(49, 96, 2)  # every other row of the second matrix
    for chosen in (
        Mxfp4Matrix(linear, 48, first_column=48),
        Mxfp4Matrix(linear, 24, stored_columns=turns),
    ):
        exact = chosen.dense(0, chosen.layout.out_features)
        assert torch.equal(torch.from_numpy(evaluate(chosen)).T.float(), exact)
    assert torch.equal(exact, mxfp4.dequantize(linear, turns))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("scales", lambda x: x[:, :, :-1]),
        ("scales", lambda x: x[:-1]),
        ("scales", lambda x: x.float()),
        ("blocks", lambda x: x[..., :8]),
        ("blocks", lambda x: x[0, 0]),
        ("blocks", lambda x: x[:0]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    parts: dict[str, Tensor], part: str, change: Callable[[Tensor], Tensor]
) -> None:
    parts[part] = change(parts[part])
    with pytest.raises(ModelError, match=part):
        mxfp4.check(parts, "test")


def test_missing_scales_are_named(parts: dict[str, Tensor]) -> None:
    with pytest.raises(ModelError, match="'scales' is missing"):
        mxfp4.check({"blocks": parts["blocks"]}, "test")


def test_an_exponent_that_is_nan_is_refused(parts: dict[str, Tensor]) -> None:
    parts["scales"][1, 5, 2] = 255
    matrix = Mxfp4Matrix(mxfp4.check(parts, "test"), 48, first_column=48, where="here")
    with pytest.raises(WeightValueError, match="NaN"):
        matrix.columns(0, 48)
