"""GGUF files as a source: every decodable type, and tensors outside their file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import _type_traits, dequantize

from exl_core.errors import ModelError, UnsupportedModelError, WeightFileError
from exl_core.formats.codecs.ggml.layout import PLAIN_DTYPES, REMOVED_TYPES
from exl_core.formats.containers.gguf import GgufSource, rope_factors

ROWS, COLUMNS = 6, 512


def write(path: Path, kind: GGMLQuantizationType, raw: np.ndarray) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", sorted(_type_traits), ids=lambda kind: kind.name)
def test_every_type_is_read_with_the_values_of_the_gguf_package(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 60, (ROWS, COLUMNS // block_values * block_bytes), dtype=np.uint8)
    source = GgufSource(write(tmp_path / "m.gguf", kind, raw))
    expected = torch.from_numpy(dequantize(raw, kind))

    rows = torch.tensor([5, 0, 3])
    assert source.tensors["w"].shape == (ROWS, COLUMNS)
    assert torch.equal(source.read("w", slice(None)).float(), expected)
    assert torch.equal(source.read("w", rows).float(), expected[rows])


def test_a_file_truncated_in_its_data_is_refused_when_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", GGMLQuantizationType.F32, np.zeros((64, 64), np.float32))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 4096])
    with pytest.raises(WeightFileError, match="lies outside the file"):
        GgufSource(path)


def test_an_unknown_element_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", GGMLQuantizationType.F32, np.zeros((4, 32), np.float32))
    data = bytearray(path.read_bytes())
    at = data.index(b"w", data.index(b"llama")) + 1 + 4 + 8 + 8  # name, dimensions, then the type
    data[at : at + 4] = (9999).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match="unknown element type"):
        GgufSource(path)


def test_a_type_that_weights_cannot_have_is_named(tmp_path: Path) -> None:
    source = GgufSource(
        write(tmp_path / "m.gguf", GGMLQuantizationType.I32, np.zeros((4, 32), np.int32))
    )
    with pytest.raises(UnsupportedModelError, match="I32, which cannot be decoded"):
        source.check_readable("w")


WITHOUT_DECODER = sorted({*GGMLQuantizationType} - {*_type_traits, *PLAIN_DTYPES})


@pytest.mark.parametrize("kind", WITHOUT_DECODER, ids=lambda kind: kind.name)
def test_every_other_type_is_refused_by_name(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.zeros((ROWS, COLUMNS // block_values * block_bytes), np.uint8)
    source = GgufSource(write(tmp_path / "m.gguf", kind, raw))
    with pytest.raises(UnsupportedModelError, match=f"as {kind.name}, .*such as Q4_K_M") as caught:
        source.check_readable("w")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("type_id", REMOVED_TYPES)
def test_types_of_earlier_days_are_refused_by_name(tmp_path: Path, type_id: int) -> None:
    path = write(tmp_path / "m.gguf", GGMLQuantizationType.F32, np.zeros((4, 32), np.float32))
    data = bytearray(path.read_bytes())
    at = data.index(b"w", data.index(b"llama")) + 1 + 4 + 8 + 8  # name, dimensions, then the type
    data[at : at + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=f"as {REMOVED_TYPES[type_id]},.*such as"):
        GgufSource(path)


@pytest.mark.parametrize("shape", [(2, 4), (0,), (5000,)])
def test_rope_factors_of_a_wrong_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("rope_freqs.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        rope_factors(GgufSource(path))


def write_split(folder: Path) -> list[Path]:
    """A model of two files, in the names and fields of llama.cpp's gguf-split."""
    paths = [folder / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(f"w{number}", np.full((2, 32), number + 1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.mark.parametrize("named", [0, 1])
def test_all_parts_of_a_split_model_are_read_whichever_is_named(tmp_path: Path, named: int) -> None:
    source = GgufSource(write_split(tmp_path)[named])
    assert source.metadata["split.no"] == 0
    for number in (0, 1):
        assert torch.equal(
            source.read(f"w{number}", slice(None)), torch.full((2, 32), number + 1.0)
        )


def test_a_missing_part_of_a_split_model_is_named(tmp_path: Path) -> None:
    first, second = write_split(tmp_path)
    second.unlink()
    with pytest.raises(WeightFileError, match=r"no m-00002-of-00002\.gguf.*Fetch all parts"):
        GgufSource(first)


def test_parts_of_two_models_are_refused(tmp_path: Path) -> None:
    first, second = write_split(tmp_path)
    writer = GGUFWriter(second, "llama")
    writer.add_tensor("w1", np.zeros((2, 32), np.float32))
    writer.add_tensor("w2", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightFileError, match="do not belong together"):
        GgufSource(first)
