"""FP8 matrices: random ones against a slow model of the format, and damaged ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from exl_core.errors import (
    ConfigError,
    MissingTensorError,
    UnsupportedModelError,
    WeightFileError,
    WeightShapeError,
    WeightValueError,
)
from exl_core.formats.codecs.compressed import layout as compressed
from exl_core.formats.codecs.fp8 import layout as fp8
from exl_core.formats.codecs.fp8.matrix import Fp8Matrix
from support.quantized import Fp8Layer, random_fp8
from support.runtime_form import E4M3, evaluate

WHERE = "model.safetensors: layers.0.up_proj"


def check(layer: Fp8Layer, **changes: Tensor) -> fp8.Fp8Linear:
    return fp8.check(layer.parts | changes, fp8.parse_block(layer.config(), WHERE), WHERE)


def test_numbers_of_the_slow_model_are_those_of_torch() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    is_number = (np.arange(256) & 0x7F) != 0x7F
    assert np.array_equal(E4M3[is_number], numbers.numpy()[is_number])
    assert numbers[~torch.from_numpy(is_number)].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("block", [None, (128, 128), (32, 32), (48, 64)], ids=str)
def test_matrices_are_read_exactly(block: tuple[int, int] | None, dtype: torch.dtype) -> None:
    layer = random_fp8(6, block, rows=160, columns=80, dtype=dtype)
    exact = layer.dense()
    matrix = Fp8Matrix(check(layer), 80)
    assert matrix.layout.formula == "e4m3"
    assert matrix.layout.scale_dtype is (torch.float32 if dtype is torch.float32 else torch.half)
    assert np.array_equal(evaluate(matrix, step=16), exact.numpy())
    assert torch.equal(matrix.dense(0, 80).T, exact.float())
    part = Fp8Matrix(check(layer), 20, first_column=33)
    assert np.array_equal(evaluate(part, step=16), exact[:, 33:53].numpy())
    assert torch.equal(part.dense(0, 20).T, exact[:, 33:53].float())
    order = torch.randperm(80, generator=torch.Generator().manual_seed(2))[:40]
    part = Fp8Matrix(check(layer), 40, stored_columns=order)
    assert np.array_equal(evaluate(part, step=16), exact[:, order].numpy())


def test_one_scale_for_a_whole_matrix_or_row() -> None:
    layer = random_fp8(1, None, rows=64)
    for shape in ((), (1,), (1, 1)):
        matrix = Fp8Matrix(check(layer, weight_scale_inv=torch.full(shape, 0.25)), 32)
        assert np.array_equal(evaluate(matrix), (E4M3[layer.codes] * 0.25).T)
    flat = check(layer, weight_scale_inv=layer.scales.flatten())
    assert np.array_equal(evaluate(Fp8Matrix(flat, 32)), layer.dense().numpy())


def float_config(**weights: Any) -> dict[str, object]:
    group = {"weights": {"num_bits": 8, "type": "float", **weights}}
    return {"format": "float-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"strategy": "channel"}, None),
        ({"strategy": "tensor"}, None),
        ({"strategy": "block", "block_structure": [128, 64]}, (128, 64)),
        ({"strategy": "block", "block_structure": "128x64"}, (128, 64)),
    ],
)
def test_schemes_of_compressed_tensors(
    weights: dict[str, Any], block: tuple[int, int] | None
) -> None:
    assert compressed.parse_settings(float_config(**weights), WHERE).block() == block


@pytest.mark.parametrize("block", [None, [128], [128, 0], "128x?", [128, 1.5]])
def test_impossible_blocks_are_refused(block: object) -> None:
    with pytest.raises(ConfigError, match="'block_structure' has no usable value"):
        compressed.parse_settings(float_config(strategy="block", block_structure=block), WHERE)
    if block is not None:
        with pytest.raises(ConfigError, match="'weight_block_size' has no usable value"):
            fp8.parse_block({"weight_block_size": block}, WHERE)


def test_other_kinds_of_floats_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="expected e4m3, got e5m2"):
        fp8.parse_block({"fmt": "e5m2"}, WHERE)


@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_a_missing_tensor_is_named(name: str) -> None:
    layer = random_fp8(1, None, rows=64)
    parts = layer.parts
    del parts[name]
    with pytest.raises(MissingTensorError, match=f"layers.0.up_proj: tensor '{name}' is missing"):
        fp8.check(parts, None, WHERE)


@pytest.mark.parametrize("block", [None, (32, 32)], ids=str)
def test_a_truncated_or_longer_tensor_is_refused(block: tuple[int, int] | None) -> None:
    layer = random_fp8(1, block, rows=96, columns=64)
    for name, step in (("weight", 32), ("weight_scale_inv", 1)):
        tensor = layer.parts[name]
        as_bytes = tensor.view(torch.uint8) if name == "weight" else tensor
        for dim in range(1 if block is None else 2):
            size = tensor.shape[dim]
            for damaged in (
                as_bytes.narrow(dim, 0, size - step),
                as_bytes.narrow(dim, 0, 0),
                torch.cat([as_bytes, as_bytes], dim),
            ):
                with pytest.raises(WeightShapeError, match="'weight"):
                    check(layer, **{name: damaged.contiguous().view(tensor.dtype)})
        with pytest.raises(WeightFileError, match=f"'{name}' has another type"):
            check(layer, **{name: tensor.double()})


def test_two_kinds_of_scales_are_refused() -> None:
    layer = random_fp8(1, None, rows=64)
    with pytest.raises(WeightFileError, match="'weight_scale_inv' and 'weight_scale' are both"):
        check(layer, weight_scale=layer.scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_unusable_scale_is_refused(value: float) -> None:
    layer = random_fp8(1, (32, 32), rows=96)
    scales = layer.scales.clone()
    scales[0, 2] = value
    with pytest.raises(WeightValueError, match="'weight_scale_inv' has no usable value at index 2"):
        check(layer, weight_scale_inv=scales)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_among_the_weights_is_refused(code: int) -> None:
    layer = random_fp8(1, None, rows=64)
    codes = layer.parts["weight"].view(torch.uint8).clone()
    codes[7, 40] = code
    matrix = Fp8Matrix(check(layer, weight=codes.view(torch.float8_e4m3fn)), 32, where=WHERE)
    with pytest.raises(WeightValueError, match="'weight' holds 1 values that are NaN"):
        matrix.columns(0, 32)
    assert int(matrix.dense(0, 32).isnan().sum()) == 1
