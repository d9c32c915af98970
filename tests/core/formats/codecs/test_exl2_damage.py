"""Damaged EXL2 layers: a single fault is refused, or changes only the weights that it governs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_core.errors import (
    MissingTensorError,
    ModelError,
    WeightFileError,
    WeightShapeError,
    WeightValueError,
)
from exl_core.formats.codecs.exl2 import layout as exl2
from support.profiles import examples, first_by_default
from support.quantized import flip_bit, random_exl2

WHERE = "model.safetensors: layers.0.up_proj"
GROUPS = ((8, 32), (8, 32), (6, 64), (5, 32), (4, 64), (4, 64), (4, 64), (3, 32), (2, 64), (2, 32))
LAYER = random_exl2(11, GROUPS)
FIRST_ROWS = [sum(rows for _, rows in GROUPS[:i]) for i in range(len(GROUPS))]


def check(**changes: Tensor) -> exl2.Exl2Linear:
    return exl2.check(LAYER.parts | changes, WHERE)


def changed_weights(parts: dict[str, Tensor]) -> Tensor:
    """Mask of weights that differ from the intact layer's, [stored rows, columns]. All weights must
    be finite."""
    dense = exl2.dequantize(exl2.check(parts, WHERE))
    assert dense.isfinite().all()
    permutation = torch.from_numpy(LAYER.invperm).argsort()
    return (dense != LAYER.dense())[permutation]


@pytest.mark.parametrize("name", exl2.PARTS)
def test_a_missing_tensor_is_named(name: str) -> None:
    parts = LAYER.parts
    del parts[name]
    with pytest.raises(MissingTensorError, match=f"layers.0.up_proj: tensor '{name}' is missing"):
        exl2.check(parts, WHERE)


def test_other_tensors_of_the_layer_are_ignored() -> None:
    extra = {"q_perm": torch.zeros(1), "bias": torch.zeros(32).half()}
    assert exl2.check(LAYER.parts | extra, WHERE).in_features == len(LAYER.invperm)


@pytest.mark.parametrize("name", exl2.PARTS)
def test_a_wrong_dtype_is_refused(name: str) -> None:
    tensor = LAYER.parts[name]
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.uint8):
        with pytest.raises(WeightFileError, match=f"'{name}' has another type") as caught:
            check(**{name: tensor.to(dtype)})
        assert caught.value.got == str(dtype)
        assert caught.value.where == WHERE


@pytest.mark.parametrize("name", exl2.PARTS)
def test_a_truncated_or_longer_tensor_is_refused(name: str) -> None:
    tensor = LAYER.parts[name]
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        for damaged in (
            tensor.narrow(dim, 0, size - 1),
            tensor.narrow(dim, 0, 0),
            tensor.narrow(dim, 0, size // 2),
            torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim),
            torch.cat([tensor, tensor], dim),
        ):
            with pytest.raises((WeightShapeError, WeightFileError)):
                check(**{name: damaged})
    for damaged in (tensor[None], tensor.flatten() if tensor.dim() > 1 else tensor[:, None]):
        with pytest.raises(WeightShapeError, match=f"'{name}' has an impossible shape"):
            check(**{name: damaged})


def test_columns_must_be_a_multiple_of_32() -> None:
    layer = random_exl2(1, [(4, 32)], columns=40)
    with pytest.raises(WeightShapeError, match="number of columns") as caught:
        exl2.check(layer.parts, WHERE)
    assert (caught.value.expected, caught.value.got) == ("a multiple of 32", "40")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([7, 0], "group 0: .*expected a width of 2, 3, 4, 5, 6, 8, got 7 bits"),
        ([0, 0], "got 0 bits"),
        ([-8, 0], "got -8 bits"),
        ([8, 1], "its first row in 'q_weight' to be 0, got 1"),
        ([3, 0, 4, 6], "group 1: .*expected at most 3 bits, as the group before, got 4 bits"),
        ([4, 0, 4, 0], "group 0: .*expected a first row below 0, where it ends, got 0"),
        ([4, 0, 4, 8, 4, 4], "group 1: .*expected a first row below 4, where it ends, got 8"),
        ([4, 0, 4, 12], "group 1: .*expected a first row below 12, where it ends, got 12"),
        ([4, 0, 4, -4], "expected a first row below -4"),
        ([4, 0, 4, 6], "group 0: .*expected a multiple of 4 rows in 'q_weight', got 6"),
        ([4, 0, 3, 4], "group 1: .*expected a multiple of 3 rows in 'q_weight', got 8"),
        ([4, 0, 4, 4], "group 1: .*expected 32 rows, as other groups of 4 bits, got 64 rows"),
        ([4, 0], r"'q_invperm' .*the groups have 96 rows in all .*expected \(96,\), got \(64,\)"),
    ],
)
def test_errors_about_the_group_table_are_specific(table: list[int], message: str) -> None:
    count = len(table) // 2
    parts = {
        "q_weight": torch.zeros(12, 32, dtype=torch.int32),
        "q_scale": torch.zeros(count, 4, dtype=torch.int32),
        "q_scale_max": torch.zeros(count, dtype=torch.float16),
        "q_groups": torch.tensor(table, dtype=torch.int16),
        "q_invperm": torch.arange(64, dtype=torch.int32),
    }
    with pytest.raises((WeightFileError, WeightShapeError), match=message):
        exl2.check(parts, WHERE)


def test_more_rows_than_16_bits_can_index_are_refused() -> None:
    rows = 65536 + 32
    parts = {
        "q_weight": torch.zeros(rows // 16, 32, dtype=torch.int32),
        "q_scale": torch.zeros(1, 4, dtype=torch.int32),
        "q_scale_max": torch.zeros(1, dtype=torch.float16),
        "q_groups": torch.tensor([2, 0], dtype=torch.int16),
        "q_invperm": torch.arange(rows, dtype=torch.int32),
    }
    with pytest.raises(WeightShapeError, match=r"too many rows .expected at most 65536, got 65568"):
        exl2.check(parts, WHERE)


@settings(max_examples=examples(25))
@given(data=st.data(), counts=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_any_single_wrong_number_in_a_group_table_is_refused(
    data: st.DataObject, counts: list[int]
) -> None:
    groups: list[tuple[int, int]] = []
    for bits, count in zip((8, 6, 5, 4, 3, 2), counts, strict=True):
        groups += [(bits, data.draw(st.sampled_from([32, 64, 128])))] * count
    bits, size = groups.pop() if groups else (4, 128)
    groups.append((bits, data.draw(st.integers(1, size // 32)) * 32))
    parts = random_exl2(0, groups).parts
    exl2.check(parts, WHERE)

    intact = parts["q_groups"]
    for index in range(len(intact)):
        values = range(-3, parts["q_weight"].shape[0] + 3) if index % 2 else range(-1, 33)
        for value in set(values) - {int(intact[index])}:
            parts["q_groups"] = intact.clone()
            parts["q_groups"][index] = value
            with pytest.raises(ModelError):
                exl2.check(parts, WHERE)


def test_any_flipped_bit_of_the_group_table_is_refused() -> None:
    intact = LAYER.parts
    for index in range(2 * len(GROUPS)):
        for bit in range(16):
            parts = dict(intact)
            flip_bit(parts, "q_groups", (index,), bit)
            with pytest.raises(ModelError):
                exl2.check(parts, WHERE)


def test_any_flipped_bit_of_the_permutation_is_refused() -> None:
    intact = LAYER.parts
    for feature in range(0, len(LAYER.invperm), 13):
        for bit in range(32):
            parts = dict(intact)
            flip_bit(parts, "q_invperm", (feature,), bit)
            with pytest.raises(WeightFileError, match="q_invperm"):
                exl2.check(parts, WHERE)


def test_the_error_names_the_features_that_share_a_row() -> None:
    invperm = LAYER.parts["q_invperm"]
    invperm[7] = invperm[3]
    with pytest.raises(WeightFileError, match=rf"got row {int(invperm[3])} for features \[3, 7\]"):
        check(q_invperm=invperm)


def test_a_damaged_scale_is_refused_or_affects_its_group_only() -> None:
    intact, refused = LAYER.parts, 0
    for group, (_, rows) in enumerate(GROUPS):
        for bit in range(16):
            parts = dict(intact)
            flip_bit(parts, "q_scale_max", (group,), bit)
            try:
                changed = changed_weights(parts)
            except WeightValueError as error:
                assert "q_scale_max" in str(error)
                refused += 1
                continue
            changed[FIRST_ROWS[group] : FIRST_ROWS[group] + rows] = False
            assert not changed.any()
    assert refused >= len(GROUPS)  # at least for a flipped sign bit


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 6e4])
def test_an_unusable_scale_is_refused_with_its_group(value: float) -> None:
    scale_max = LAYER.parts["q_scale_max"]
    scale_max[2] = value
    with pytest.raises(WeightValueError, match=r"'q_scale_max' (has no usable|makes weights)"):
        check(q_scale_max=scale_max)


def test_a_large_scale_is_accepted_if_its_weights_fit_float16() -> None:
    layer = random_exl2(2, [(8, 32)])
    layer.codes[:] = 129  # one above the zero point
    layer.scale_max[:] = 60000
    assert torch.equal(exl2.dequantize(exl2.check(layer.parts, WHERE)), layer.dense())


@pytest.mark.parametrize("group", first_by_default([4, 0, len(GROUPS) - 1]))
def test_a_damaged_scale_code_affects_its_column_and_group_only(group: int) -> None:
    intact = LAYER.parts
    for word in range(4):
        for bit in range(32):
            parts = dict(intact)
            flip_bit(parts, "q_scale", (group, word), bit)
            changed = changed_weights(parts)
            assert (
                changed.any() or LAYER.scale_max[group] < 1e-4
            )  # scales so small that they round to the same weights
            end = FIRST_ROWS[group] + GROUPS[group][1]
            changed[FIRST_ROWS[group] : end, 8 * word + bit // 4] = False
            assert not changed.any()


def test_a_damaged_code_changes_at_most_one_weight() -> None:
    intact = LAYER.parts
    packed_rows = intact["q_weight"].shape[0]
    for row in range(packed_rows):
        parts = dict(intact)
        column, bit = 5 * row % 32, 11 * row % 32
        flip_bit(parts, "q_weight", (row, column), bit)
        changed = changed_weights(parts)
        assert int(changed.sum()) <= 1
        assert int(changed[:, column].sum()) == int(changed.sum())
