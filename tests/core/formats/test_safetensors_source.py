"""Safetensors files as a source: values that are read, and every kind of damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exl_core.errors import ModelNotFoundError, UnsupportedModelError, WeightFileError
from exl_core.formats.containers.safetensors import SafetensorsSource


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_read_as_they_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.randn(37, 5).to(dtype)
    save_file({"w": matrix, "b": torch.randn(3)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)

    assert source.tensors["w"].shape == (37, 5)
    assert torch.equal(source.read("w", slice(16, 37)), matrix[16:])
    rows = torch.tensor([3, 1, 36])
    assert torch.equal(source.read("w", rows), matrix[rows])


def test_unaligned_rows_are_copied_without_the_rest_of_the_tensor(tmp_path: Path) -> None:
    matrix, empty = torch.randn(37, 5), torch.zeros(0, 5)
    header = json.dumps({"w": entry("F32", [37, 5], 0, 740), "e": entry("F32", [0, 5], 740, 740)})
    text = header.ljust(-(-len(header) // 8) * 8 + 1).encode()  # one byte beyond alignment
    write(tmp_path / "model.safetensors", text, matrix.numpy().tobytes())
    source = SafetensorsSource(tmp_path)

    for rows in (slice(0, 16), slice(16, 32), slice(32, 64), slice(7, 7)):
        values = source.read("w", rows)
        assert torch.equal(values, matrix[rows])
        assert values.untyped_storage().nbytes() == matrix[rows].numel() * 4
    chosen = torch.tensor([3, 1, 36])
    assert torch.equal(source.read("w", chosen), matrix[chosen])
    assert torch.equal(source.read("e", slice(None)), empty)


def test_only_shards_listed_in_the_index_are_read(tmp_path: Path) -> None:
    first, second = torch.randn(2, 2), torch.randn(2, 2)
    save_file({"a": first}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": second}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": second}, tmp_path / "stray.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    source = SafetensorsSource(tmp_path)

    assert torch.equal(source.read("a", slice(None)), first)
    assert torch.equal(source.read("b", slice(None)), second)


HALF = entry("F32", [2, 2], 0, 16)
DAMAGED = {
    "empty": (b"", "header is cut off"),
    "cut-in-length": (b"\x10\x00", "header is cut off"),
    "cut-in-header": (struct.pack("<Q", 500) + b'{"w"', "header is cut off"),
    "absurd-length": (struct.pack("<Q", 2**63) + b"{}", "header is cut off"),
}


@pytest.mark.parametrize("content, message", DAMAGED.values(), ids=DAMAGED)
def test_a_truncated_header_is_reported_as_such(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightFileError, match=message) as caught:
        SafetensorsSource(tmp_path)
    assert caught.value.where == str(path)


BAD_HEADERS = {
    "not-json": (b"{{{", 16, "not valid JSON"),
    "a-list": (b"[]", 16, "no JSON object"),
    "deep": (b'{"a":' + b"[" * 100_000, 16, "not valid JSON"),
    "long-integer": (b'{"a": ' + b"1" * 5000 + b"}", 16, "not valid JSON"),
    "absurd-shape": ({"w": entry("F32", [10**400, 10**400], 0, 16)}, 16, "malformed"),
    "entry-is-text": ({"w": "x"}, 16, "malformed"),
    "negative-size": ({"w": entry("F32", [-2, 2], 0, 16)}, 16, "malformed"),
    "offsets-reversed": ({"w": entry("F32", [2, 2], 16, 0)}, 16, "malformed"),
    "outside-the-file": ({"w": entry("F32", [2, 2], 0, 16)}, 12, "lies outside the file"),
    "size-and-shape-differ": ({"w": entry("F32", [2, 3], 0, 16)}, 16, "does not fit its shape"),
    "overlapping": ({"w": HALF, "v": HALF}, 16, "cannot be opened"),
}


@pytest.mark.parametrize("header, size, message", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_malformed_header_is_refused(
    tmp_path: Path, header: object, size: int, message: str
) -> None:
    write(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(WeightFileError, match=message):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "files, message",
    [({}, "no .*safetensors"), ({"pytorch_model.bin": b""}, "pickle"), ({"m.gguf": b""}, "GGUF")],
    ids=["empty", "pickle", "gguf"],
)
def test_the_error_for_a_directory_without_safetensors_gives_advice(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=message):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "index, message",
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "1 of them missing"),
        ({"weight_map": {"a": "../outside.safetensors"}}, "outside its own folder"),
        ({"weights": {}}, "not a weight index"),
        ({"weight_map": {}}, "not a weight index"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: object, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightFileError, match=message):
        SafetensorsSource(tmp_path)


def test_an_integer_tensor_is_refused_as_a_weight(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(UnsupportedModelError, match="element type that weights cannot have"):
        source.check_readable("w")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(WeightFileError, match="is also in"):
        SafetensorsSource(tmp_path)


def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(WeightFileError, match="cannot be read"):
        SafetensorsSource(tmp_path)
