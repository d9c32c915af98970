"""Run-time forms of quantized matrices agree with their exact dequantization."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor

from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2.matrix import Exl2Matrix
from exl_core.formats.codecs.ggml.matrix import bad_blocks, columns_of, layout_of
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.formats.codecs.gptq.matrix import GptqMatrix
from exl_core.formats.codecs.runtime import RuntimeMatrix
from support.gguf_models import random_blocks
from support.profiles import first_by_default
from support.quantized import bit_pattern, random_exl2, random_gptq
from support.runtime_form import evaluate, half_ulp, weights

MIXES = [
    [(8, 32)],
    [(4, 128), (4, 128), (4, 96)],
    [(8, 32), (8, 32), (6, 64), (5, 32), (4, 64), (3, 32), (2, 64), (2, 32)],
    [(6, 128), (5, 64), (3, 128), (3, 32)],
]


def assert_within_half_ulp(matrix: RuntimeMatrix, exact: Tensor, step: int = 32) -> None:
    """Asserts that rounding the matrix gives `exact`, float16 [in_features, out_features]."""
    unrounded = evaluate(matrix, step)
    assert unrounded.shape == tuple(exact.shape)
    assert (np.abs(unrounded - exact.double().numpy()) <= half_ulp(exact)).all()


def settings_of(config: dict[str, object]) -> gptq.GptqSettings:
    return gptq.parse_settings(config, "test")


def test_golden_exl2_matrices(shared_dir: Path) -> None:
    tensors = load_file(shared_dir / "golden/exl2_reference.safetensors")
    stems = sorted(name.removesuffix(".dense") for name in tensors if name.endswith(".dense"))
    assert len(stems) == 4
    for stem in stems:
        parts = {part: tensors[f"{stem}.{part}"] for part in exl2.PARTS}
        dense = tensors[f"{stem}.dense"]
        matrix = Exl2Matrix(exl2.check(parts, stem), dense.shape[1])
        assert_within_half_ulp(matrix, dense, step=256)
        assert torch.equal(bit_pattern(matrix.dense(0, dense.shape[1])), bit_pattern(dense.T))


def test_golden_gptq_matrices(shared_dir: Path) -> None:
    tensors = load_file(shared_dir / "golden/gptq_reference.safetensors")
    variants = json.loads((shared_dir / "golden/gptq_reference.json").read_text())
    stems = sorted(name.removesuffix(".dense") for name in tensors if name.endswith(".dense"))
    assert len(stems) >= 8
    formulas = set()
    for stem in stems:
        settings = settings_of(variants[stem.split("/")[0]])
        parts = {p: tensors[f"{stem}.{p}"] for p in gptq.PARTS if f"{stem}.{p}" in tensors}
        dense = tensors[f"{stem}.dense"]
        matrix = GptqMatrix(gptq.check(parts, settings, stem), dense.shape[1])
        formulas.add(matrix.layout.formula)
        assert_within_half_ulp(matrix, dense, step=256)
        assert torch.equal(matrix.dense(0, dense.shape[1]).T, dense)  # 0 and -0 are equal here
    assert formulas == {"middle", "zeros"}


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("prescale", [1.0, 0.22, -3.5])
def test_exl2_layers_of_mixed_widths(groups: list[tuple[int, int]], prescale: float) -> None:
    layer = random_exl2(3, groups, columns=96)
    linear = exl2.check(layer.parts, "test")
    matrix = Exl2Matrix(linear, 96, prescale=prescale)
    assert_within_half_ulp(matrix, layer.dense(prescale), step=48)
    assert torch.equal(bit_pattern(matrix.dense(0, 96).T), bit_pattern(layer.dense(prescale)))


def test_exl2_column_ranges_without_padding() -> None:
    layer = random_exl2(5, [(5, 64), (2, 32)], columns=96)
    linear = exl2.check(layer.parts, "test")
    for first, count in ((0, 70), (40, 8), (43, 50), (32, 64)):
        matrix = Exl2Matrix(linear, count, first_column=first)
        assert matrix.layout.out_features == count
        exact = layer.dense()[:, first : first + count].contiguous()
        assert_within_half_ulp(matrix, exact)
        assert torch.equal(matrix.dense(0, count).T, exact)


def test_columns_in_another_order() -> None:
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3)) + 20
    layer = random_exl2(5, [(5, 64), (2, 32)], columns=96)
    matrix: RuntimeMatrix = Exl2Matrix(exl2.check(layer.parts, "test"), 70, stored_columns=order)
    assert_within_half_ulp(matrix, layer.dense()[:, order].contiguous())
    assert torch.equal(matrix.dense(0, 70).T, layer.dense()[:, order])
    stored = random_gptq(7, 4, 32, rows=64, columns=96, has_act_order=True)
    matrix = GptqMatrix(
        gptq.check(stored.parts, settings_of(stored.config()), "test"),
        70,
        stored_columns=order,
    )
    assert_within_half_ulp(matrix, stored.dense()[:, order].contiguous(), step=16)
    assert torch.equal(matrix.dense(16, 48).T, stored.dense()[:, order[16:48]])


def test_exl2_with_identity_order_has_no_permutation() -> None:
    parts = random_exl2(1, [(4, 64)]).parts
    parts["q_invperm"] = torch.arange(64, dtype=torch.int32)
    assert Exl2Matrix(exl2.check(parts, "test"), 32).layout.features is None


@pytest.mark.parametrize("bits", gptq.WIDTHS)
@pytest.mark.parametrize(
    ("rows", "group_size"),
    first_by_default([(96, 32), (96, -1), (96, 64), (64, 16), (96, 128), (96, 24)], 3),
)
@pytest.mark.parametrize("has_act_order", [False, True], ids=["plain", "act-order"])
@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
def test_gptq_layers_of_every_kind(
    bits: int, rows: int, group_size: int, has_act_order: bool, is_v2: bool
) -> None:
    layer = random_gptq(
        7, bits, group_size, rows=rows, columns=64, is_v2=is_v2, has_act_order=has_act_order
    )
    linear = gptq.check(layer.parts, settings_of(layer.config()), "test")
    matrix = GptqMatrix(linear, 64)
    assert_within_half_ulp(matrix, layer.dense(), step=16)
    part = GptqMatrix(linear, 20, first_column=36)
    assert_within_half_ulp(part, layer.dense()[:, 36:56].contiguous(), step=16)
    assert torch.equal(part.dense(0, 20).T, layer.dense()[:, 36:56])


def test_symmetric_gptq_needs_no_zero_points() -> None:
    layer = random_gptq(2, 4, 32, rows=64, is_symmetric=True)
    matrix = GptqMatrix(gptq.check(layer.parts, settings_of(layer.config()), "test"), 32)
    assert matrix.layout.formula == "middle"
    assert matrix.columns(0, 32).offsets is None
    assert_within_half_ulp(matrix, layer.dense())


K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
FLOAT_SCALES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_TYPES, "IQ4_NL", "IQ4_XS"]
KINDS = [*FLOAT_SCALES, "MXFP4"]


@pytest.mark.parametrize("name", KINDS)
def test_gguf_blocks_match_the_gguf_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    raw = random_blocks(kind, 48, 512)
    layout = layout_of(kind, 48, 512)
    assert layout is not None
    exact = torch.from_numpy(np.array(dequantize(raw, kind)).T.copy())  # float32
    unrounded = weights(layout, columns_of(torch.from_numpy(raw), kind))
    assert (np.abs(unrounded - exact.double().numpy()) <= half_ulp(exact)).all()


@pytest.mark.parametrize("name", K_TYPES)
def test_multiplying_out_the_scales_of_k_types_is_exact(name: str) -> None:
    kind = GGMLQuantizationType[name]
    raw = random_blocks(kind, 48, 512)
    columns, layout = columns_of(torch.from_numpy(raw), kind), layout_of(kind, 48, 512)
    assert layout is not None
    assert columns.scales is not None
    ((bits, _, rows),) = layout.runs
    scales = columns.scales.repeat_interleave(rows, 0)
    if columns.offsets is None:
        values = scales * (columns.codes.float() - 2 ** (bits - 1))
    else:
        values = scales * columns.codes.float() + columns.offsets.repeat_interleave(rows, 0)
    exact = torch.from_numpy(np.array(dequantize(raw, kind))).T.contiguous()
    assert torch.equal(values.view(torch.int32), exact.view(torch.int32))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_K", "IQ3_S"])
def test_types_without_a_run_time_form(name: str) -> None:
    assert layout_of(GGMLQuantizationType[name], 32, 256) is None


@pytest.mark.parametrize("name", FLOAT_SCALES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_scales_are_counted(name: str, value: float) -> None:
    kind = GGMLQuantizationType[name]
    raw = random_blocks(kind, 4, 512)
    assert bad_blocks(torch.from_numpy(raw), kind) == 0
    size = GGML_QUANT_SIZES[kind][1]
    offset = 2 if name.endswith(("_1", "_K")) else 0  # of the minimum, if the type has one
    if name in ("Q2_K", "Q3_K", "Q6_K"):  # which store their scales last
        offset = size - 2
    for row in (0, 3):
        last = raw.shape[1] - size + offset
        raw[row, last : last + 2] = np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)
    assert bad_blocks(torch.from_numpy(raw), kind) == 2


def test_exponents_that_are_nan_are_counted() -> None:
    raw = torch.full((4, 3 * 17), 100, dtype=torch.uint8)
    raw[1, 17] = raw[3, 34] = 255
    raw[2, 1] = 255  # codes
    assert bad_blocks(raw, GGMLQuantizationType.MXFP4) == 2
