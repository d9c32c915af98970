"""Packed compressed-tensors layers: random ones against a slow model, and damaged ones."""

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
from exl_core.formats.codecs.compressed.matrix import CompressedMatrix
from support.quantized import CompressedLayer, random_compressed
from support.runtime_form import evaluate

WHERE = "model.safetensors: layers.0.up_proj"


def check(layer: CompressedLayer, **changes: Tensor) -> compressed.CompressedLinear:
    settings = compressed.parse_settings(layer.config(), WHERE)
    return compressed.check(layer.parts | changes, settings, layer.codes.shape[1], WHERE)


@pytest.mark.parametrize("bits", compressed.WIDTHS)
@pytest.mark.parametrize("group_size", [32, 64, None])
@pytest.mark.parametrize("is_symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("has_act_order", [False, True], ids=["plain", "act-order"])
def test_layers_are_read_exactly(
    bits: int, group_size: int | None, is_symmetric: bool, has_act_order: bool
) -> None:
    layer = random_compressed(
        6,
        bits,
        group_size,
        rows=128,
        columns=64,
        is_symmetric=is_symmetric,
        has_act_order=has_act_order,
    )
    exact = layer.dense()
    matrix = CompressedMatrix(check(layer), 64)
    assert matrix.layout.formula == ("middle" if is_symmetric else "zeros")
    assert np.array_equal(evaluate(matrix, step=16), exact.double().numpy())
    assert torch.equal(matrix.dense(0, 64).T, exact)
    part = CompressedMatrix(check(layer), 20, first_column=13)
    assert np.array_equal(evaluate(part, step=16), exact[:, 13:33].double().numpy())
    assert torch.equal(part.dense(0, 20).T, exact[:, 13:33])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:40]
    part = CompressedMatrix(check(layer), 40, stored_columns=order)
    assert np.array_equal(evaluate(part, step=16), exact[:, order].double().numpy())
    assert torch.equal(part.dense(0, 40).T, exact[:, order])


def test_one_scale_for_a_whole_matrix() -> None:
    layer = random_compressed(1, 8, None, rows=64)
    expected = (layer.codes - 128.0).T * 0.25
    for shape in ((), (1,), (1, 1)):
        matrix = CompressedMatrix(check(layer, weight_scale=torch.full(shape, 0.25)), 32)
        assert np.array_equal(evaluate(matrix), expected)


def test_zero_points_may_be_stored_unpacked() -> None:
    layer = random_compressed(1, 4, 32, rows=64, is_symmetric=False)
    assert layer.zeros is not None
    unpacked = torch.from_numpy(layer.zeros - 8).to(torch.int8)
    matrix = CompressedMatrix(check(layer, weight_zero_point=unpacked), 32)
    assert np.array_equal(evaluate(matrix), layer.dense().double().numpy())
    with pytest.raises(WeightFileError, match="'weight_zero_point' holds a number beyond"):
        check(layer, weight_zero_point=unpacked + 8)


def test_g_idx_of_minus_one_is_unused() -> None:
    layer = random_compressed(1, 4, 32, rows=64)
    linear = check(layer, weight_g_idx=torch.full((64,), -1, dtype=torch.int32))
    assert linear.g_idx is None


def test_schemes_of_other_layers_do_not_matter() -> None:
    """A model with two groups of layers: the shapes of a matrix tell which one it belongs to."""
    wide, narrow = random_compressed(1, 8, None, rows=64), random_compressed(2, 4, 32, rows=64)
    config: dict[str, Any] = narrow.config()
    config["config_groups"]["group_1"] = wide.config()["config_groups"]["group_0"]  # type: ignore[index]
    settings = compressed.parse_settings(config, WHERE)
    assert len(settings.schemes) == 2
    for layer, bits in ((wide, 8), (narrow, 4)):
        assert compressed.check(layer.parts, settings, 64, WHERE).bits == bits


def changed(layer: CompressedLayer, top: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = layer.config() | top
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("top", "weights", "message"),
    [
        ({"format": "marlin-24"}, {}, "format 'marlin-24' with weights of type 'int' cannot be"),
        ({"format": "nvfp4-pack-quantized"}, {"type": "float"}, "got nvfp4-pack-quantized, float"),
        ({"format": "int-quantized"}, {"num_bits": 8}, "got int-quantized, int"),
        ({}, {"num_bits": 3}, "int weights of this width cannot be read .expected 4 bits or 8"),
        ({}, {"type": "float"}, "format 'pack-quantized' with weights of type 'float'"),
        ({}, {"strategy": "tensor_group"}, "got tensor_group"),
        ({"format": "float-quantized"}, {"type": "float"}, "expected 8 bits, got 4"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparse weights cannot be read"),
    ],
)
def test_other_kinds_are_refused_by_name(
    top: dict[str, Any], weights: dict[str, Any], message: str
) -> None:
    layer = random_compressed(1, 4, 32, rows=64)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        compressed.parse_settings(changed(layer, top, weights), "config.json")
    assert "config.json" in str(caught.value.where)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("top", "weights", "message"),
    [
        ({"config_groups": {"group_0": {"weights": None}}}, None, "'weights' is missing"),
        ({"config_groups": None}, None, "'config_groups' is missing"),
        ({"config_groups": {}}, None, "'config_groups' is empty"),
        ({}, {"num_bits": "4"}, "'num_bits' has no usable value"),
        ({}, {"group_size": -1}, "'group_size' has no usable value"),
        ({}, {"group_size": -7}, "'group_size' has no usable value"),
    ],
)
def test_invalid_settings_are_refused(
    top: dict[str, Any], weights: dict[str, Any] | None, message: str
) -> None:
    layer = random_compressed(1, 4, 32, rows=64)
    config = layer.config() | top if weights is None else changed(layer, top, weights)
    with pytest.raises(ConfigError, match=message):
        compressed.parse_settings(config, "config.json")


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_missing_tensor_is_named(name: str) -> None:
    layer = random_compressed(1, 4, 32, rows=64)
    parts = layer.parts
    del parts[name]
    with pytest.raises(MissingTensorError, match=f"layers.0.up_proj: tensor '{name}' is missing"):
        compressed.check(parts, compressed.parse_settings(layer.config(), WHERE), 64, WHERE)


@pytest.mark.parametrize("name", compressed.PARTS)
def test_a_truncated_or_longer_tensor_is_refused(name: str) -> None:
    layer = random_compressed(1, 4, 32, rows=96, is_symmetric=False, has_act_order=True)
    tensor = layer.parts[name]
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        for damaged in (
            tensor.narrow(dim, 0, size - 1),
            tensor.narrow(dim, 0, 0),
            torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim),
            torch.cat([tensor, tensor], dim),
        ):
            with pytest.raises(WeightShapeError, match="'weight_"):
                check(layer, **{name: damaged})
    with pytest.raises(WeightShapeError, match=f"'{name}' "):
        check(layer, **{name: tensor[None]})
    with pytest.raises(WeightFileError, match=f"'{name}' has another type"):
        check(layer, **{name: tensor.to(torch.int16)})


@pytest.mark.parametrize("change", [{"num_bits": 8}, {"group_size": 16}, {"group_size": 64}])
def test_settings_that_contradict_the_shapes_are_refused(change: dict[str, Any]) -> None:
    layer = random_compressed(1, 4, 32, rows=96)
    settings = compressed.parse_settings(changed(layer, {}, change), WHERE)
    with pytest.raises(WeightShapeError, match=r"shapes of no scheme .* got 12 words and 3 scales"):
        compressed.check(layer.parts, settings, 96, WHERE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_unusable_scale_is_refused(value: float) -> None:
    layer = random_compressed(1, 4, 32, rows=96)
    scales = layer.parts["weight_scale"]
    scales[5, 1] = value
    with pytest.raises(WeightValueError, match="'weight_scale' has no usable value at index 16"):
        check(layer, weight_scale=scales)


def test_groups_of_impossible_sizes_are_refused() -> None:
    layer = random_compressed(1, 4, 32, rows=96, has_act_order=True)
    for value in (-1, 3, 0):
        g_idx = layer.parts["weight_g_idx"].clone()
        g_idx[g_idx == 1] = value
        with pytest.raises(WeightFileError, match="'weight_g_idx' contradicts"):
            check(layer, weight_g_idx=g_idx)
