"""GGUF files as a source: every decodable type, and tensors outside their file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import _type_traits, dequantize

from exl_core.errors import ModelError, UnsupportedModelError, WeightFileError
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
