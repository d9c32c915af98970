"""GPTQ layers: those of GPTQModel, and random ones against a slow model of the format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from exl_core.formats.codecs.gptq import layout as gptq
from support.profiles import examples, first_by_default
from support.quantized import GptqLayer, bit_pattern, random_gptq

WIDTHS = (2, 3, 4, 8)
GOLDEN = {
    "w2g32asym",
    "w2g32asym_v2",
    "w3g32asym_act",
    "w4g32asym_act",
    "w4g32asym_act_v2",
    "w4g64sym",
    "w4gm1sym_act",
    "w8g64sym",
}


def read(layer: GptqLayer) -> gptq.GptqLinear:
    return gptq.check(layer.parts, gptq.parse_settings(layer.config(), "a test"), "a test")


def assert_exact(layer: GptqLayer) -> None:
    linear = read(layer)
    assert torch.equal(gptq.unpack_codes(linear), torch.from_numpy(layer.codes).byte())
    assert torch.equal(gptq.unpack_zero_points(linear), torch.from_numpy(layer.zeros).byte())
    assert torch.equal(gptq.row_groups(linear), torch.from_numpy(layer.group_of_row))
    assert torch.equal(bit_pattern(gptq.dequantize(linear)), bit_pattern(layer.dense()))


def test_layers_of_gptqmodel_have_its_dequantized_values(shared_dir: Path) -> None:
    folder = shared_dir / "golden"
    tensors = load_file(folder / "gptq_reference.safetensors")
    configs = json.loads((folder / "gptq_reference.json").read_text(encoding="utf-8"))
    keys = {name.rpartition(".")[0] for name in tensors}
    assert {key.partition("/")[0] for key in keys} >= GOLDEN
    for key in sorted(keys):
        parts = {name: tensors[f"{key}.{name}"] for name in gptq.PARTS}
        linear = gptq.check(parts, gptq.parse_settings(configs[key.partition("/")[0]], key), key)
        assert torch.equal(gptq.dequantize(linear), tensors[f"{key}.dense"]), key


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("is_symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("has_act_order", [False, True], ids=["plain", "act"])
@pytest.mark.parametrize(  # the layers have 160 rows
    "group_size", first_by_default([32, 100, -1, 48, 160, 1000], 3)
)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_combination_of_settings_is_read_exactly(
    bits: int, group_size: int, has_act_order: bool, is_symmetric: bool, is_v2: bool
) -> None:
    layer = random_gptq(
        bits * group_size % 97,
        bits,
        group_size,
        rows=160,
        has_act_order=has_act_order,
        is_symmetric=is_symmetric,
        is_v2=is_v2,
    )
    assert_exact(layer)


@settings(max_examples=examples(40))
@given(data=st.data(), bits=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32 - 1))
def test_awkward_sizes_are_read_exactly(data: st.DataObject, bits: int, seed: int) -> None:
    step = 32 if bits == 3 else 32 // bits
    rows = step * data.draw(st.integers(1, 6))
    layer = random_gptq(
        seed,
        bits,
        data.draw(st.integers(1, rows + 3)),
        rows=rows,
        columns=step * data.draw(st.integers(1, 3)),
        has_act_order=data.draw(st.booleans()),
        is_v2=data.draw(st.booleans()),
    )
    assert_exact(layer)


@pytest.mark.parametrize(("bits", "ones"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101)])
def test_a_zero_point_of_0_borrows_from_the_next_field(bits: int, ones: int) -> None:
    """Its field is stored as all ones, and the next field as one less than expected."""
    layer = random_gptq(0, bits, -1, rows=32)
    layer.zeros[:] = 1
    layer.zeros[0, 0] = 0
    stored = int(layer.parts["qzeros"][0, 0])
    assert stored == (1 - 2) % (1 << 32) - (1 << 32)  # the borrow propagates through the whole word
    assert int(layer.parts["qzeros"][0, 1]) == 0
    assert_exact(layer)
    assert ones == sum(1 << shift for shift in range(0, 32, bits))


def test_3_bit_zero_points_wrap_individually() -> None:
    layer = random_gptq(0, 3, -1, rows=32)
    layer.zeros[:] = 1
    layer.zeros[0, 10] = 0  # straddles two words
    assert layer.parts["qzeros"][0].tolist() == [-(1 << 30), 1, 0]
    assert_exact(layer)


def test_values_do_not_depend_on_the_chunk_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for bits in WIDTHS:
        layer = random_gptq(bits, bits, 48, rows=224, has_act_order=True)
        for values in (1, 32 * 96, 1 << 30):
            monkeypatch.setattr(gptq, "CHUNK_VALUES", values)
            assert_exact(layer)


def test_a_trivial_g_idx_is_dropped() -> None:
    layer = random_gptq(1, 4, 32, rows=96)
    config = gptq.parse_settings(layer.config(), "a test")
    sorted_rows, parts = layer.parts, layer.parts
    all_zero = parts | {"g_idx": torch.zeros(96, dtype=torch.int32)}
    del parts["g_idx"]
    for variant in (sorted_rows, parts, all_zero):
        linear = gptq.check(variant, config, "a test")
        assert linear.g_idx is None
        assert torch.equal(gptq.dequantize(linear), layer.dense())


def test_scales_of_other_types_are_rounded_to_float16() -> None:
    layer = random_gptq(2, 4, 32, rows=64)
    config = gptq.parse_settings(layer.config(), "a test")
    wide = layer.parts["scales"].float() * (1 + 2**-14)  # less than half a step above
    linear = gptq.check(layer.parts | {"scales": wide}, config, "a test")
    assert torch.equal(gptq.dequantize(linear), layer.dense())

    narrow = layer.parts["scales"].bfloat16()
    layer.scales[:] = narrow.half().numpy()
    linear = gptq.check(layer.parts | {"scales": narrow}, config, "a test")
    assert torch.equal(gptq.dequantize(linear), layer.dense())


def test_negative_scales_are_accepted() -> None:
    layer = random_gptq(3, 4, 32, rows=64)
    layer.scales[:, ::2] *= -1
    assert_exact(layer)


def test_size_and_bits_per_weight_match_the_tensors() -> None:
    linear = read(random_gptq(4, 4, 32, rows=96, columns=64, has_act_order=True))
    assert (linear.in_features, linear.out_features, linear.group_rows) == (96, 64, 32)
    size = 96 * 64 // 2 + 3 * 64 // 2 + 3 * 64 * 2 + 96 * 4
    assert linear.size_bytes == size
    assert linear.bits_per_weight == size * 8 / (96 * 64)
    one_group = read(random_gptq(4, 8, -1, rows=96, columns=64))
    assert one_group.group_rows == 96
    assert one_group.size_bytes == 96 * 64 + 64 + 64 * 2
