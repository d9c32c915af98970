"""EXL2 layers, read and written: layers of the reference converter, and random ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from exl_core.errors import WeightValueError
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2 import writer as exl2_writer
from support.profiles import examples
from support.quantized import Exl2Layer, bit_pattern, random_exl2

WIDTHS = (8, 6, 5, 4, 3, 2)
GOLDEN_WIDTHS = {
    "model.layers.0.self_attn.q_proj": {4},
    "model.layers.0.self_attn.v_proj": {4},
    "model.layers.12.mlp.gate_proj": {3, 2},
    "model.layers.7.mlp.down_proj": {8, 4},
}
EVERY_WIDTH = ((8, 32), (8, 32), (6, 64), (5, 32), (4, 128), (4, 128), (3, 32), (2, 64), (2, 32))


@st.composite
def group_tables(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Any mix of widths and group sizes, with or without a shorter last group."""
    table: list[tuple[int, int]] = []
    for bits in sorted(draw(st.sets(st.sampled_from(WIDTHS), min_size=1)), reverse=True):
        size = draw(st.sampled_from([32, 64, 128]))
        table += [(bits, size)] * draw(st.integers(1, 3))
    bits, size = table[-1]
    table[-1] = (bits, draw(st.integers(1, size // 32)) * 32)
    return table


def read(layer: Exl2Layer) -> exl2.Exl2Linear:
    return exl2.check(layer.parts, "a test")


def scale_codes_of(linear: exl2.Exl2Linear) -> Tensor:
    """Stored scale codes 0 .. 15, uint8 [groups, out_features]."""
    words = linear.q_scale.numpy().view(np.uint32)[:, :, None] >> np.arange(0, 32, 4)
    return torch.from_numpy((words & 15).astype(np.uint8)).flatten(1)


def rewrite(linear: exl2.Exl2Linear) -> exl2.Exl2Linear:
    return exl2_writer.pack(
        exl2.unpack_codes(linear),
        groups=[(group.bits, group.rows) for group in linear.groups],
        scale_codes=scale_codes_of(linear),
        scale_max=linear.q_scale_max,
        invperm=linear.q_invperm,
    )


def raw_bytes(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()


def assert_same_bytes(linear: exl2.Exl2Linear, parts: dict[str, Tensor]) -> None:
    for name in exl2.PARTS:
        assert raw_bytes(getattr(linear, name)) == raw_bytes(parts[name]), name


def test_layers_of_the_reference_converter_are_read_bit_exactly(shared_dir: Path) -> None:
    tensors = load_file(shared_dir / "golden" / "exl2_reference.safetensors")
    keys = {name.rpartition(".")[0] for name in tensors}
    assert keys >= GOLDEN_WIDTHS.keys()
    for key in sorted(keys):
        parts = {name: tensors[f"{key}.{name}"] for name in exl2.PARTS}
        linear = exl2.check(parts, key)
        dense = tensors[f"{key}.dense"]
        assert torch.equal(bit_pattern(exl2.dequantize(linear)), bit_pattern(dense)), key
        assert_same_bytes(rewrite(linear), parts)
        widths = {group.bits for group in linear.groups}
        assert widths == GOLDEN_WIDTHS.get(key, widths)


@settings(max_examples=examples(40))
@given(groups=group_tables(), columns=st.sampled_from([32, 64, 96]), seed=st.integers(0, 2**32 - 1))
def test_random_layers_are_read_exactly_and_rewritten_byte_equal(
    groups: list[tuple[int, int]], columns: int, seed: int
) -> None:
    layer = random_exl2(seed, groups, columns)
    parts = layer.parts
    linear = exl2.check(parts, "a test")

    assert [(group.bits, group.rows) for group in linear.groups] == groups
    assert (linear.in_features, linear.out_features) == layer.codes.shape
    assert torch.equal(exl2.unpack_codes(linear), torch.from_numpy(layer.codes).to(torch.uint8))
    assert torch.equal(bit_pattern(exl2.dequantize(linear)), bit_pattern(layer.dense()))
    assert_same_bytes(rewrite(linear), parts)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows", [32, 64, 96, 160])
def test_layers_of_a_single_width_are_read_exactly(bits: int, rows: int) -> None:
    layer = random_exl2(rows + bits, [(bits, rows)])
    assert torch.equal(bit_pattern(exl2.dequantize(read(layer))), bit_pattern(layer.dense()))


@pytest.mark.parametrize(
    ("scale_max", "code", "step", "scale", "weight_0", "weight_9"),
    [
        (0x3C00, 15, 0x1C00, 0x3C00, 0xC800, 0x3C00),
        (0x3C00, 0, 0x1C00, 0x1C00, 0xA800, 0x1C00),
        (0x224C, 15, 0x0326, 0x224C, 0xAE4C, 0x224C),
        (0x224C, 4, 0x0326, 0x14EB, 0xA0EB, 0x14EB),
        (0x124F, 9, 0x0032, 0x0CE2, 0x98E2, 0x0CE2),
        (0x124F, 15, 0x0032, 0x1240, 0x9E40, 0x1240),  # not 124F: the step is subnormal
        (0x3400, 7, 0x1400, 0x2C00, 0xB800, 0x2C00),
    ],
)
def test_scales_are_rounded_twice_in_the_order_of_the_format(
    *, scale_max: int, code: int, step: int, scale: int, weight_0: int, weight_9: int
) -> None:
    def half(pattern: int) -> Tensor:
        return torch.from_numpy(np.array([pattern], dtype=np.uint16).view(np.float16))

    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[5] = 9
    linear = exl2_writer.pack(
        codes,
        groups=[(4, 32)],
        scale_codes=torch.full((1, 32), code),
        scale_max=half(scale_max),
        invperm=torch.arange(32),
    )
    weight = exl2.dequantize(linear)
    assert torch.equal((half(scale_max).float() / 256).half(), half(step))
    assert torch.equal(exl2.unpack_scales(linear), half(scale).expand(1, 32))
    assert torch.equal(weight[0], half(weight_0).expand(32))
    assert torch.equal(weight[5], half(weight_9).expand(32))


@pytest.mark.parametrize("prescale", [1.4 / math.sqrt(40), 0.0625, 3.0, -0.5])
def test_prescale_is_applied_before_the_scales_are_rounded(prescale: float) -> None:
    layer = random_exl2(3, EVERY_WIDTH)
    weight = exl2.dequantize(read(layer), prescale=prescale)
    assert torch.equal(bit_pattern(weight), bit_pattern(layer.dense(prescale)))


def test_a_prescale_that_overflows_float16_is_refused() -> None:
    linear = read(random_exl2(3, EVERY_WIDTH))
    with pytest.raises(WeightValueError, match=r"a test: .*too large for float16"):
        exl2.dequantize(linear, prescale=1e6, where="a test")
    with pytest.raises(ValueError, match="prescale is nan"):
        exl2.dequantize(linear, prescale=math.nan)


def test_values_do_not_depend_on_the_chunk_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = random_exl2(4, EVERY_WIDTH, columns=64)
    for values in (1, 64 * 96, 1 << 30):
        monkeypatch.setattr(exl2, "CHUNK_VALUES", values)
        linear = read(layer)
        assert torch.equal(bit_pattern(exl2.dequantize(linear)), bit_pattern(layer.dense()))
        assert torch.equal(exl2.unpack_codes(linear), torch.from_numpy(layer.codes).byte())


def test_size_and_bits_per_weight_match_the_tensors() -> None:
    groups, columns = ((8, 32), (4, 64), (4, 64)), 32
    linear = read(random_exl2(5, groups, columns))
    packed_bits = sum(bits * rows * columns for bits, rows in groups)
    overhead_bits = len(groups) * (16 + 32 + 4 * columns) + 32 * 160
    assert linear.size_bytes * 8 == packed_bits + overhead_bits
    assert linear.bits_per_weight == (packed_bits + overhead_bits) / (160 * columns)


@pytest.mark.parametrize("columns", [1, 31, 33, 40])
def test_the_writer_pads_columns_with_exact_zeros(columns: int) -> None:
    layer = random_exl2(6, EVERY_WIDTH, columns=40)
    linear = exl2_writer.pack(
        torch.from_numpy(layer.codes)[:, :columns],
        groups=EVERY_WIDTH,
        scale_codes=torch.from_numpy(layer.scale_codes)[:, :columns],
        scale_max=torch.from_numpy(layer.scale_max),
        invperm=torch.from_numpy(layer.invperm),
    )
    weight = exl2.dequantize(linear)
    assert linear.out_features == (32 if columns <= 32 else 64)
    assert torch.equal(bit_pattern(weight[:, :columns]), bit_pattern(layer.dense()[:, :columns]))
    assert not bit_pattern(weight[:, columns:]).any()
    assert not scale_codes_of(linear)[:, columns:].any()


def test_padding_with_arbitrary_scale_codes_is_accepted() -> None:
    layer = random_exl2(7, [(5, 32)])
    layer.codes[:, 24:] = 16
    layer.scale_codes[:, 24:] = 15
    assert not exl2.dequantize(read(layer))[:, 24:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": [(4, 32)]}, "do not cover 64 rows"),
        ({"groups": [(4, 16), (4, 48)]}, "no group can have 16 rows"),
        ({"groups": [(7, 32), (4, 32)]}, "no group can have 32 rows of 7 bits"),
        ({"groups": [(4, 32), (3, 32)]}, "does not fit 3 bits"),
        ({"scale_codes": torch.full((2, 32), 16)}, "does not fit 4 bits"),
        ({"scale_codes": torch.full((2, 32), -1)}, "does not fit 4 bits"),
        ({"scale_codes": torch.zeros(1, 32)}, "2 groups, but scale codes"),
        ({"codes": torch.full((64, 32), -1)}, "does not fit 4 bits"),
    ],
)
def test_the_writer_refuses_values_that_the_format_cannot_store(
    change: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {
        "codes": torch.full((64, 32), 15),
        "groups": [(4, 32), (4, 32)],
        "scale_codes": torch.zeros(2, 32, dtype=torch.uint8),
        "scale_max": torch.ones(2),
        "invperm": torch.arange(64),
    } | change
    with pytest.raises(ValueError, match=message):
        exl2_writer.pack(**arguments)  # type: ignore[arg-type]
