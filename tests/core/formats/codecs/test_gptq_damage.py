"""GPTQ layers and settings that are damaged, or of an unsupported kind."""

from __future__ import annotations

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
from exl_core.formats.codecs.gptq import layout as gptq
from support.profiles import first_by_default
from support.quantized import GptqLayer, flip_bit, random_gptq

WHERE = "model.safetensors: layers.0.up_proj"
CONFIG: dict[str, object] = {
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "sym": False,
    "quant_method": "gptq",
    "format": "gptq",
    "checkpoint_format": "gptq",
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
    "pack_dtype": "int32",
    "lm_head": False,
    "dynamic": None,
}


def layer_of(bits: int, **options: bool) -> GptqLayer:
    return random_gptq(21, bits, 32, rows=160, **options)


def check(layer: GptqLayer, **changes: Tensor) -> gptq.GptqLinear:
    settings = gptq.parse_settings(layer.config(), WHERE)
    return gptq.check(layer.parts | changes, settings, WHERE)


def changed_weights(layer: GptqLayer, parts: dict[str, Tensor]) -> Tensor:
    dense = gptq.dequantize(check(layer, **parts))
    assert dense.isfinite().all()
    return dense != layer.dense()


def test_the_checkpoint_format_is_read_under_either_key() -> None:
    expected = gptq.GptqSettings(4, 32, False, True, gptq.CheckpointFormat.GPTQ)
    assert gptq.parse_settings(CONFIG, WHERE) == expected
    for key in ("format", "checkpoint_format"):
        config = {k: v for k, v in CONFIG.items() if not k.endswith("format")} | {key: "gptq_v2"}
        settings = gptq.parse_settings(config, WHERE)
        assert settings.checkpoint_format is gptq.CheckpointFormat.GPTQ_V2


def test_minimal_settings_mean_the_older_zero_point_convention() -> None:
    settings = gptq.parse_settings({"bits": 8, "group_size": -1}, WHERE)
    assert settings == gptq.GptqSettings(8, -1, True, False, gptq.CheckpointFormat.GPTQ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "weights quantized with 'awq' are not GPTQ"),
        ({"bits": 5}, "this width is not supported .expected 2, 3, 4 or 8 bits, got 5 bits"),
        ({"bits": 16}, "got 16 bits"),
        ({"format": "gptq_p", "checkpoint_format": "gptq_p"}, "in the format 'gptq_p' are not"),
        ({"format": None, "checkpoint_format": "marlin"}, "in the format 'marlin' are not"),
        ({"is_marlin_format": True}, "in the layout of Marlin is not supported"),
        ({"pack_dtype": "int16"}, "packed into other words is not supported"),
        ({"dynamic": {"-:.*q_proj": {}, "+:.*up_proj": {"bits": 8}}}, r"got \+:\.\*up_proj"),
    ],
)
def test_other_methods_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        gptq.parse_settings(CONFIG | change, "quantize_config.json")
    assert caught.value.where == "quantize_config.json"
    assert caught.value.next_step


def test_rules_that_exclude_layers_are_accepted() -> None:
    config = CONFIG | {"dynamic": {"-:.*q_proj": {}}}
    assert gptq.parse_settings(config, WHERE) == gptq.parse_settings(CONFIG, WHERE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": None}, "'bits' is missing"),
        ({"bits": "4"}, "'bits' has no usable value"),
        ({"bits": True}, "'bits' has no usable value"),
        ({"group_size": None}, "'group_size' is missing"),
        ({"group_size": 0}, "'group_size' has no usable value"),
        ({"group_size": -2}, "'group_size' has no usable value"),
        ({"group_size": "128"}, "'group_size' has no usable value"),
        ({"desc_act": "yes"}, "'desc_act' has no usable value"),
        ({"sym": 1}, "'sym' has no usable value"),
        ({"checkpoint_format": "gptq_v2"}, "contradict each other .got 'gptq_v2' and 'gptq'"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        gptq.parse_settings(CONFIG | change, "config.json")
    assert caught.value.where == "config.json"


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(name: str) -> None:
    layer = layer_of(4)
    parts = layer.parts
    del parts[name]
    with pytest.raises(MissingTensorError, match=f"layers.0.up_proj: tensor '{name}' is missing"):
        gptq.check(parts, gptq.parse_settings(layer.config(), WHERE), WHERE)


def test_act_order_without_g_idx_is_refused() -> None:
    layer = layer_of(4, has_act_order=True)
    parts = layer.parts
    settings = gptq.parse_settings(layer.config(), WHERE)
    for g_idx in (None, torch.zeros(160, dtype=torch.int32)):
        del parts["g_idx"]
        changed = parts if g_idx is None else parts | {"g_idx": g_idx}
        with pytest.raises(MissingTensorError, match="'g_idx' is missing or all zero"):
            gptq.check(changed, settings, WHERE)
        parts = layer.parts


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", gptq.PARTS)
def test_a_truncated_or_longer_tensor_is_refused(name: str, bits: int) -> None:
    layer = layer_of(bits, has_act_order=True)
    tensor = layer.parts[name]
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        for damaged in (
            tensor.narrow(dim, 0, size - 1),
            tensor.narrow(dim, 0, 0),
            torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim),
            torch.cat([tensor, tensor], dim),
        ):
            with pytest.raises(WeightShapeError, match=r"'(qweight|qzeros|scales|g_idx)'"):
                check(layer, **{name: damaged})
    with pytest.raises(WeightShapeError, match=f"'{name}' has an impossible shape"):
        check(layer, **{name: tensor[None]})


@pytest.mark.parametrize("name", gptq.PARTS)
def test_a_wrong_dtype_is_refused(name: str) -> None:
    layer = layer_of(4, has_act_order=True)
    for dtype in (torch.int64, torch.float64, torch.uint8):
        with pytest.raises(WeightFileError, match=f"'{name}' has another type"):
            check(layer, **{name: layer.parts[name].to(dtype)})


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("other", [2, 3, 4, 8])
def test_a_wrong_width_in_the_settings_is_refused(bits: int, other: int) -> None:
    layer = layer_of(bits)
    settings = gptq.parse_settings(layer.config() | {"bits": other}, WHERE)
    if other == bits:
        assert gptq.check(layer.parts, settings, WHERE).in_features == 160
        return
    with pytest.raises(WeightShapeError):
        gptq.check(layer.parts, settings, WHERE)


@pytest.mark.parametrize("group_size", [-1, 16, 64, 128])
def test_a_wrong_group_size_in_the_settings_is_refused(group_size: int) -> None:
    layer = layer_of(4)
    settings = gptq.parse_settings(layer.config() | {"group_size": group_size}, WHERE)
    message = "'qzeros' does not go with the others: 160 rows of 4 bits in groups of"
    with pytest.raises(WeightShapeError, match=message):
        gptq.check(layer.parts, settings, WHERE)


def test_a_wrong_group_size_with_the_same_number_of_groups_is_refused() -> None:
    layer = layer_of(4)
    settings = gptq.parse_settings(layer.config() | {"group_size": 39}, WHERE)
    message = (
        "'g_idx' gives group 0 a wrong number of rows .expected 39, as 'group_size' has it, got"
    )
    with pytest.raises(WeightFileError, match=message):
        gptq.check(layer.parts, settings, WHERE)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
def test_a_symmetric_layer_with_the_other_zero_point_convention_is_refused(
    bits: int, is_v2: bool
) -> None:
    layer = layer_of(bits, is_symmetric=True, is_v2=is_v2)
    config = layer.config() | {"sym": True}
    right = gptq.check(layer.parts, gptq.parse_settings(config, WHERE), WHERE)
    assert torch.equal(gptq.dequantize(right), layer.dense())

    config["checkpoint_format"] = "gptq" if is_v2 else "gptq_v2"
    with pytest.raises(WeightFileError, match="'qzeros' contradicts 'checkpoint_format'"):
        gptq.check(layer.parts, gptq.parse_settings(config, WHERE), WHERE)


@pytest.mark.parametrize("has_act_order", [False, True], ids=["plain", "act"])
def test_any_single_wrong_number_in_g_idx_is_refused(has_act_order: bool) -> None:
    layer = random_gptq(5, 4, 32, rows=80, has_act_order=has_act_order)  # the last group has 16
    intact = layer.parts["g_idx"]
    for row in range(80):
        for value in {-1, 0, 1, 2, 3, 1 << 30} - {int(intact[row])}:
            damaged = intact.clone()
            damaged[row] = value
            with pytest.raises(WeightFileError, match=r"'g_idx' (names|gives) "):
                check(layer, g_idx=damaged)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_damaged_code_changes_at_most_one_weight(bits: int) -> None:
    layer = layer_of(bits, has_act_order=True)
    for row in range(5 * bits):
        parts = layer.parts
        column = 5 * row % 32
        flip_bit(parts, "qweight", (row, column), 11 * row % 32)
        changed = changed_weights(layer, parts)
        assert int(changed.sum()) <= 1
        assert int(changed[:, column].sum()) == int(changed.sum())


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_damaged_zero_point_affects_its_group_and_word_only(bits: int, is_v2: bool) -> None:
    layer = layer_of(bits, has_act_order=True, is_v2=is_v2)
    in_group = torch.from_numpy(layer.group_of_row == 2)[:, None]
    for word in range(bits):
        columns = torch.arange(32)  # governed: columns whose zero point has a bit in the word
        governed = (columns * bits < 32 * (word + 1)) & ((columns + 1) * bits > 32 * word)
        for bit in range(0, 32, 3):
            parts = layer.parts
            flip_bit(parts, "qzeros", (2, word), bit)
            changed = changed_weights(layer, parts)
            assert changed.any()
            assert not (changed & ~(in_group & governed)).any()


@pytest.mark.parametrize("step", first_by_default([4, 1]))
def test_a_damaged_scale_is_refused_or_affects_its_group_and_column_only(step: int) -> None:
    layer = layer_of(8, has_act_order=True)
    in_group = torch.from_numpy(layer.group_of_row == 3)
    refused = 0
    for column in range(0, 32, step):
        for bit in range(16):
            parts = layer.parts
            flip_bit(parts, "scales", (3, column), bit)
            try:
                changed = changed_weights(layer, parts)
            except WeightValueError as error:
                assert "'scales'" in str(error)
                refused += 1
                continue
            changed[in_group, column] = False
            assert not changed.any()
    assert refused > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e6, 6e4])
def test_an_unusable_scale_is_refused_with_its_group_and_column(value: float) -> None:
    layer = layer_of(4)
    scales = layer.parts["scales"].float()
    scales[1, 5] = value
    message = "has no usable value for group 1, column 5|makes weights too large for float16"
    with pytest.raises(WeightValueError, match=message):
        check(layer, scales=scales)
