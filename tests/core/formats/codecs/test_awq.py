"""AWQ layers: random ones against a slow model of the format, and damaged ones."""

from __future__ import annotations

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
from exl_core.formats.codecs.awq import layout as awq
from exl_core.formats.codecs.awq.matrix import AwqMatrix
from support.quantized import AwqLayer, as_int32, flip_bit, random_awq
from support.runtime_form import evaluate

WHERE = "model.safetensors: layers.0.up_proj"


def check(layer: AwqLayer, **changes: Tensor) -> awq.AwqLinear:
    return awq.check(layer.parts | changes, awq.parse_settings(layer.config(), WHERE), WHERE)


def test_fields_of_a_word_are_columns_in_autoawqs_order() -> None:
    """AutoAWQ unpacks field by field, then takes its reverse order: 0, 4, 1, 5, 2, 6, 3, 7."""
    word = as_int32(np.array([[0x76543210]], dtype=np.uint32))  # field i holds i
    assert awq.unpack(word).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize("is_symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("group_size", [32, 16, 96])
def test_layers_are_read_exactly(group_size: int, is_symmetric: bool) -> None:
    layer = random_awq(3, group_size, rows=96, columns=64, is_symmetric=is_symmetric)
    linear, exact = check(layer), layer.dense()
    assert torch.equal(awq.dequantize(linear), exact)
    matrix = AwqMatrix(linear, 64)
    assert matrix.layout.formula == ("middle" if is_symmetric else "zeros")
    assert np.array_equal(evaluate(matrix, step=16), exact.double().numpy())
    assert torch.equal(matrix.dense(0, 64).T, exact)


def test_column_ranges_may_begin_inside_a_word() -> None:
    layer = random_awq(4, 32, rows=64, columns=64)
    for first, count in ((0, 20), (12, 8), (13, 50)):
        part = AwqMatrix(check(layer), count, first_column=first)
        exact = layer.dense()[:, first : first + count]
        assert np.array_equal(evaluate(part, step=16), exact.double().numpy())
        assert torch.equal(part.dense(0, count).T, exact)


def test_columns_in_another_order() -> None:
    layer = random_awq(4, 32, rows=64, columns=64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:40]
    part = AwqMatrix(check(layer), 40, stored_columns=order)
    assert np.array_equal(evaluate(part, step=16), layer.dense()[:, order].double().numpy())
    assert torch.equal(part.dense(0, 40).T, layer.dense()[:, order])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [((0.5, 0.0123), torch.float16), ((0.5, 1e-7), torch.float32)],  # 1e-7 is no float16
)
def test_bfloat16_scales_are_not_rounded(values: tuple[float, float], dtype: torch.dtype) -> None:
    layer = random_awq(5, 32, rows=64)
    scales = torch.tensor(values).bfloat16()[:, None].repeat(1, 32)
    matrix = AwqMatrix(check(layer, scales=scales), 32)
    assert matrix.layout.scale_dtype is dtype
    zeros = layer.zeros[np.arange(64) // 32]
    exact = (layer.codes - zeros) * scales.double().numpy()[np.arange(64) // 32]
    assert np.array_equal(evaluate(matrix), exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "this width is not supported .expected 4 bits, got 3 bits"),
        ({"version": "gemv"}, "this packing is not supported .expected 'version' gemm, got gemv"),
        ({"version": "GEMV_FAST"}, "got gemv_fast"),
    ],
)
def test_other_kinds_are_refused_by_name(change: dict[str, object], message: str) -> None:
    config = random_awq(1, 32, rows=32).config() | change
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        awq.parse_settings(config, "config.json")
    assert caught.value.where == "config.json"
    assert caught.value.next_step


@pytest.mark.parametrize("change", [{"bits": None}, {"group_size": 0}, {"version": 4}])
def test_invalid_settings_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))!r} "):
        awq.parse_settings(random_awq(1, 32, rows=32).config() | change, WHERE)


@pytest.mark.parametrize("name", awq.PARTS)
def test_a_missing_tensor_is_named(name: str) -> None:
    layer = random_awq(1, 32, rows=96)
    parts = layer.parts
    del parts[name]
    with pytest.raises(MissingTensorError, match=f"layers.0.up_proj: tensor '{name}' is missing"):
        awq.check(parts, awq.parse_settings(layer.config(), WHERE), WHERE)


@pytest.mark.parametrize("name", awq.PARTS)
def test_a_truncated_or_longer_tensor_is_refused(name: str) -> None:
    layer = random_awq(1, 32, rows=96)
    tensor = layer.parts[name]
    for dim in range(2):
        size = tensor.shape[dim]
        for damaged in (
            tensor.narrow(dim, 0, size - 1),
            tensor.narrow(dim, 0, 0),
            torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim),
            torch.cat([tensor, tensor], dim),
        ):
            with pytest.raises(WeightShapeError, match=r"'(qweight|qzeros|scales)'"):
                check(layer, **{name: damaged})
    with pytest.raises(WeightShapeError, match=f"'{name}' has an impossible shape"):
        check(layer, **{name: tensor[None]})
    with pytest.raises(WeightFileError, match=f"'{name}' has another type"):
        check(layer, **{name: tensor.double()})


@pytest.mark.parametrize("group_size", [-1, 16, 64])
def test_a_wrong_group_size_in_the_settings_is_refused(group_size: int) -> None:
    layer = random_awq(1, 32, rows=96)
    settings = awq.parse_settings(layer.config() | {"group_size": group_size}, WHERE)
    with pytest.raises(WeightShapeError, match=r"'(qweight|qzeros)'"):
        awq.check(layer.parts, settings, WHERE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_unusable_scale_is_refused(value: float) -> None:
    layer = random_awq(1, 32, rows=96)
    scales = layer.parts["scales"]
    scales[1, 5] = value
    with pytest.raises(WeightValueError, match="'scales' has no usable value at index 37"):
        check(layer, scales=scales)


def test_a_damaged_word_changes_one_weight_or_one_zero_point() -> None:
    layer = random_awq(1, 32, rows=96)
    for name, most in (("qweight", 1), ("qzeros", 32)):
        for bit in range(32):
            parts = layer.parts
            flip_bit(parts, name, (2, bit % 4), bit)
            changed = awq.dequantize(check(layer, **parts)) != layer.dense()
            assert 1 <= int(changed.sum()) <= most
            assert int(changed.any(0).sum()) == 1
