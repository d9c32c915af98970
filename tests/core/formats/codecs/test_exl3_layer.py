"""EXL3 layers: values to the bit, for every rate and codebook, and damaged layers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from exl_core.errors import MissingTensorError, WeightFileError, WeightShapeError, WeightValueError
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.exl3.matrix import Exl3Matrix
from exl_core.ops.backends.reference.trellis import fill_trellis, new_trellis
from exl_core.ops.weights import CODEBOOKS, Codebook
from support.quantized import bit_pattern
from support.trellis import RATES, random_exl3, states_of

WHERE = "model.safetensors: layers.0.up_proj"
HASHES = {
    "3inst": "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea",
    "mcg": "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9",
    "mul1": "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8",
}
KINDS = [(rate, book) for book in CODEBOOKS for rate in RATES if rate % 1 == 0 or book == "mul1"]
LAYER = random_exl3(3, 4, "mul1", rows=256, columns=128)


def assert_rounded(values: Tensor, exact: Tensor) -> None:
    """Checks that `values` are float64 sums in some order, rounded to float32."""
    bound = 2.0**-24 * exact.abs() + 1e-12 * exact.abs().max()
    assert values.dtype is torch.float32
    assert ((values.double() - exact).abs() <= bound).all()


def check(**changes: Tensor) -> exl3.Exl3Linear:
    return exl3.check(LAYER.parts | changes, WHERE)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_codebooks_have_the_published_values(codebook: Codebook) -> None:
    values = exl3.codebook_values(codebook).numpy().astype("<f2")
    assert hashlib.sha256(values.tobytes()).hexdigest() == HASHES[codebook]


def test_a_trellis_may_begin_between_two_words() -> None:
    """Files may align tensors to 2 bytes."""
    words = LAYER.parts["trellis"]
    shifted = torch.cat([words.new_zeros(1), words.flatten()])[1:].view(words.shape)
    assert shifted.storage_offset() == 1
    found, expected = (exl3.dequantize(check(trellis=one), 0, 128) for one in (shifted, words))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rate", "codebook"), KINDS)
def test_random_layers_have_exact_values(rate: float, codebook: Codebook) -> None:
    layer = random_exl3(int(10 * rate), rate, codebook, rows=128, columns=256)
    linear = exl3.check(layer.parts, WHERE)

    rotated = exl3.decode_tiles(linear.trellis, linear.codebook)

    assert linear.codebook == codebook
    assert torch.equal(bit_pattern(rotated), bit_pattern(torch.from_numpy(layer.rotated())))
    assert_rounded(exl3.dequantize(linear, 0, 256), layer.dense())


@pytest.mark.parametrize("rate", RATES)
def test_states_of_closed_rings_are_packed_as_stored(rate: float) -> None:
    words = torch.from_numpy(random_exl3(1, rate).words)
    states = exl3.unpack_states(words, rate)
    assert torch.equal(states, torch.from_numpy(states_of(words.numpy()).astype("int64")))
    assert torch.equal(exl3.pack_states(states, rate), words)


def test_parts_of_a_matrix_are_those_of_the_whole() -> None:
    layer = random_exl3(5, 2.5, rows=170, columns=250)
    linear = exl3.check(layer.parts, WHERE)
    out_features, in_features = 200, 170
    dense = layer.dense()[:in_features].T
    matrix = Exl3Matrix(linear, out_features, in_features)
    assert_rounded(matrix.dense(0, 96), dense[:96])
    assert_rounded(matrix.dense(96, 200), dense[96:200])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    permuted = Exl3Matrix(linear, out_features, in_features, stored_columns=order)
    assert_rounded(permuted.dense(32, 200), dense[order[32:]])

    second = Exl3Matrix(linear, 50, in_features, first_column=150)
    assert_rounded(second.dense(0, 50), dense[150:200])
    packed = new_trellis(second.layout)
    fill_trellis(packed, 0, second.columns(0, 50))
    assert torch.allclose(packed.matrix(), layer.dense()[:in_features, 150:200].T, atol=1e-12)


def test_signs_of_old_files_are_scales_of_one() -> None:
    layer = random_exl3(7, 3, "3inst", rows=256, has_signs_only=True)
    linear = exl3.check(layer.parts, WHERE)
    assert sorted(layer.parts) == ["su", "sv", "trellis"]
    assert torch.equal(linear.suh, torch.from_numpy(layer.in_scales))
    assert torch.equal(linear.svh, torch.from_numpy(layer.out_scales))


def test_layers_of_exllamav3_have_its_values_to_the_bit(shared_dir: Path) -> None:
    path = shared_dir / "golden" / "exl3_reference.safetensors"
    with safe_open(path, "pt") as file:
        cases = json.loads(file.metadata()["cases"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rates = {case: file.metadata().get(case) for case in cases}
    assert len(cases) == 61
    for case in cases:
        size = len(case) + 1
        held = {name[size:]: t for name, t in tensors.items() if name.startswith(f"{case}.")}
        if "states" in held:  # the encoder's rings
            rate = float(rates[case] or 0)
            states = held["states"].long() & 0xFFFF
            assert torch.equal(exl3.unpack_states(held["trellis"], rate), states), case
            assert torch.equal(exl3.pack_states(states, rate), held["trellis"]), case
            continue
        parts = {name: held[name] for name in exl3.PARTS if name in held}
        linear = exl3.check(parts, case)
        rotated = exl3.decode_tiles(linear.trellis, linear.codebook)
        assert torch.equal(bit_pattern(rotated), bit_pattern(held["inner"])), case
        dense = exl3.dequantize(linear, 0, linear.out_features)
        error = (held["dense"].float() - dense).norm() / dense.norm()
        assert error < 1e-3, case  # four roundings to float16, each of at most 2^-11
        y = held["x"].double() @ dense.double() + held.get("bias", torch.zeros(())).double()
        assert (held["y8"].double() - y).norm() < 2e-3 * y.norm(), case


@pytest.mark.parametrize("name", ["trellis", "suh", "svh"])
def test_a_missing_tensor_is_named(name: str) -> None:
    parts = LAYER.parts
    del parts[name]
    with pytest.raises(MissingTensorError, match=f"layers.0.up_proj: tensor '{name}' is missing"):
        exl3.check(parts, WHERE)


@pytest.mark.parametrize("name", ["trellis", "suh", "svh"])
def test_a_wrong_dtype_is_refused(name: str) -> None:
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.uint8):
        with pytest.raises(WeightFileError, match=f"'{name}' has another type"):
            check(**{name: LAYER.parts[name].to(dtype)})


@pytest.mark.parametrize(
    "shape", [(16, 8, 60), (16, 8, 8), (16, 8, 144), (16, 8), (15, 8, 64), (16, 9, 64), (0, 8, 64)]
)
def test_a_trellis_of_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightShapeError, match="trellis"):
        check(trellis=torch.zeros(shape, dtype=torch.int16))


@pytest.mark.parametrize("codebook", ["3inst", "mcg"])
def test_half_rates_have_one_codebook(codebook: Codebook) -> None:
    with pytest.raises(WeightShapeError, match=f"a rate that codebook '{codebook}' has not"):
        exl3.check(random_exl3(1, 2.5, codebook).parts, WHERE)


@pytest.mark.parametrize("name", ["suh", "svh"])
def test_scales_of_another_size_or_without_a_value_are_refused(name: str) -> None:
    with pytest.raises(WeightShapeError, match=f"'{name}' does not go with the others"):
        check(**{name: torch.ones(144).half()})
    for value in ("nan", "inf"):
        scales = LAYER.parts[name].clone()
        scales[5] = float(value)
        with pytest.raises(WeightValueError, match=f"'{name}' has no usable value at index 5"):
            check(**{name: scales})


def test_unknown_codebooks_are_refused() -> None:
    for marker in (torch.tensor(12345, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(WeightFileError, match="'mul1' marks an unknown codebook"):
            check(mul1=marker)
    with pytest.raises(WeightFileError, match="'mul1' marks an unknown codebook"):
        check(mul1=torch.tensor(1.5))
    with pytest.raises(WeightFileError, match="two codebooks"):
        check(mcg=torch.tensor(-877912083, dtype=torch.int32))
