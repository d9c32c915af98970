"""Header of GGUF files: every value type, and any damage as a typed error."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl_core.errors import WeightFileError
from exl_core.tokenizer import gguf_fields
from exl_core.tokenizer.gguf_fields import read_gguf_fields, read_gguf_header
from support.profiles import examples

HEAD = struct.Struct("<4sIQQ")


def key(name: str, type_id: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", type_id) + value


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*keys: bytes, version: int = 3, count: int | None = None, tail: bytes = b"") -> Path:
        path = tmp_path / "made.gguf"
        count = len(keys) if count is None else count
        path.write_bytes(HEAD.pack(b"GGUF", version, 0, count) + b"".join(keys) + tail)
        return path

    return write


def test_a_file_written_by_the_gguf_package_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 250)
    writer.add_int8("a.i8", -7)
    writer.add_uint16("a.u16", 65000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -70_000)
    writer.add_uint64("a.u64", 2**60)
    writer.add_int64("a.i64", -(2**60))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße\n🙂")
    writer.add_array("a.texts", ["", "x", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.5])
    writer.add_tensor("one", np.zeros((3, 5), np.float32))
    writer.add_tensor("two", np.ones(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_gguf_header(path)

    assert header.fields == {
        "general.architecture": "llama",
        "a.u8": 250,
        "a.i8": -7,
        "a.u16": 65000,
        "a.i16": -300,
        "a.u32": 4_000_000_000,
        "a.i32": -70_000,
        "a.u64": 2**60,
        "a.i64": -(2**60),
        "a.f32": 0.5,
        "a.f64": 0.1,
        "a.bool": True,
        "a.text": "grüße\n🙂",
        "a.texts": ["", "x", "日本"],
        "a.numbers": [1, -2, 3],
        "a.floats": [0.25, -1.5],
    }
    reader = gguf.GGUFReader(path)
    assert [(info.name, info.type_id, info.offset) for info in header.tensors] == [
        (tensor.name, int(tensor.tensor_type), tensor.data_offset) for tensor in reader.tensors
    ]
    assert [info.shape for info in header.tensors] == [(5, 3), (7,)]
    assert header.data_start == reader.data_offset
    assert read_gguf_fields(path) == header.fields


@pytest.mark.thorough
def test_tensor_table_of_a_real_model_matches_the_gguf_package(smollm2_path: Path) -> None:
    reader = gguf.GGUFReader(smollm2_path)

    header = read_gguf_header(smollm2_path)

    assert [(info.name, info.shape, info.type_id, info.offset) for info in header.tensors] == [
        (tensor.name, tuple(tensor.shape.tolist()), int(tensor.tensor_type), tensor.data_offset)
        for tensor in reader.tensors
    ]
    pieces = reader.fields["tokenizer.ggml.tokens"].contents()
    assert header.fields["tokenizer.ggml.tokens"] == pieces


def test_nested_arrays_are_read(write: Callable[..., Path]) -> None:
    inner = struct.pack("<IQ2i", 5, 2, 7, -8)
    path = write(key("a", 9, struct.pack("<IQ", 9, 2) + inner + inner))
    assert read_gguf_fields(path) == {"a": [[7, -8], [7, -8]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF", "the file ends inside the version"),
        (HEAD.pack(b"GGUF", 1, 0, 0), "unsupported GGUF version"),
        (HEAD.pack(b"GGUF", 4, 0, 0), "unsupported GGUF version"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "a big-endian file"),
        (
            HEAD.pack(b"GGUF", 3, 0, 2**62),
            f"the file ends inside the list of {2**62} metadata keys",
        ),
        (HEAD.pack(b"GGUF", 3, 2**62, 0), f"the file ends inside the list of {2**62} tensors"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightFileError, match=message) as caught:
        read_gguf_fields(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (struct.pack("<Q", 2**63) + b"x" * 20, "the file ends inside a metadata key"),
        (key("a", 8, struct.pack("<Q", 2**40)), "the file ends inside the value of 'a'"),
        (key("a", 9, struct.pack("<IQ", 4, 2**61)), "elements of 'a'"),
        (key("a", 9, struct.pack("<IQ", 8, 2**61)), "elements of 'a'"),
        (key("a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**63)), "string 0 of 'a'"),
        (key("a", 9, struct.pack("<IQ", 9, 2**61)), "elements of 'a'"),
        (key("a", 13, bytes(8)), "'a' has an unknown value type"),
        (key("a", 9, struct.pack("<IQ", 77, 1) + bytes(12)), "'a' has an unknown value type"),
        (key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe"), "the value of 'a' is not UTF-8"),
        (
            key("a", 9, struct.pack("<IQQ", 8, 1, 2) + b"\xff\xfe"),
            "string 0 of 'a' is not UTF-8",
        ),
        (key("general.alignment", 4, struct.pack("<I", 0)), "alignment is not usable"),
    ],
)
def test_oversized_and_damaged_entries_are_refused(
    write: Callable[..., Path], entry: bytes, message: str
) -> None:
    with pytest.raises(WeightFileError, match=message):
        read_gguf_fields(write(entry))


def test_deeply_nested_arrays_are_refused(write: Callable[..., Path]) -> None:
    path = write(key("a", 9, struct.pack("<IQ", 9, 1) * 50 + bytes(12)))
    with pytest.raises(WeightFileError, match="unknown value type"):
        read_gguf_fields(path)


def test_duplicate_keys_are_refused(write: Callable[..., Path]) -> None:
    entry = key("a", 8, text("x"))
    with pytest.raises(WeightFileError, match="metadata key 'a' appears twice"):
        read_gguf_fields(write(entry, entry))


def test_a_path_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match="cannot be read"):
        read_gguf_fields(tmp_path / "missing.gguf")


@pytest.mark.parametrize("kept", [0.5, 0.9, 0.999])
def test_truncated_metadata_is_refused(smollm2_path: Path, tmp_path: Path, kept: float) -> None:
    end = read_gguf_header(smollm2_path).data_start
    path = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(int(end * kept)))
    with pytest.raises(WeightFileError, match="the file ends inside"):
        read_gguf_header(path)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_weight_file_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """With any byte changed and any truncation, reading succeeds or raises WeightFileError."""
    tokens = key("t", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("é"))
    numbers = key("n", 9, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 3.0))
    whole = bytearray(HEAD.pack(b"GGUF", 3, 1, 3) + tokens + numbers + key("s", 8, text("hi")))
    whole += text("w") + struct.pack("<IQIQ", 1, 4, 0, 0)
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])

    try:
        fields = read_gguf_header(path).fields
    except WeightFileError as error:
        assert error.where == str(path)
    else:
        assert len(fields) <= 3


def array_of(type_id: int, count: int) -> bytes:
    return struct.pack("<IQ", type_id, count)


def refusal_of(path: Path, size: int) -> tuple[str, int]:
    """Message of the refusal of a sparse file of this size, and the peak of allocated bytes."""
    with path.open("r+b") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        with pytest.raises(WeightFileError) as caught:
            read_gguf_header(path)
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("type_id", "per_element"), [(0, 1), (6, 4), (8, 8), (9, 12)])
def test_sparse_arrays_are_refused_without_reading_them(
    write: Callable[..., Path], type_id: int, per_element: int
) -> None:
    size = 190 * 2**20
    path = write(key("a", 9, array_of(type_id, size // per_element)))
    message, peak = refusal_of(path, size + 1024)
    assert "more than a vocabulary needs" in message
    assert peak < 2**20


def test_many_arrays_count_together(write: Callable[..., Path]) -> None:
    count = gguf_fields.MAX_ELEMENTS // 2
    full = array_of(0, count) + bytes(count)
    path = write(key("a", 9, full), key("b", 9, full), key("c", 9, array_of(0, 1) + bytes(1)))
    message, _ = refusal_of(path, path.stat().st_size)
    assert "more than a vocabulary needs" in message
    nested = array_of(9, 3) + array_of(0, count) + bytes(count) + array_of(0, count)
    message, _ = refusal_of(write(key("a", 9, nested)), 10 * 2**20)
    assert "more than a vocabulary needs" in message


def test_text_is_bounded_in_single_strings_and_in_arrays(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(key("a", 8, struct.pack("<Q", 190 * 2**20)))
    message, peak = refusal_of(path, 200 * 2**20)
    assert "too much text" in message
    assert peak < 2**20
    monkeypatch.setattr(gguf_fields, "MAX_TEXT_BYTES", 1000)
    strings = array_of(8, 5) + text("x" * 300) * 5
    message, _ = refusal_of(write(key("a", 9, strings)), 4096)
    assert "too much text" in message
    assert read_gguf_fields(write(key("a", 9, array_of(8, 3) + text("x" * 300) * 3)))


@pytest.mark.parametrize(("tensors", "keys"), [(0, 2**17), (2**19, 0)])
def test_many_keys_or_tensors_are_refused(tmp_path: Path, tensors: int, keys: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HEAD.pack(b"GGUF", 3, tensors, keys))
    message, peak = refusal_of(path, 2**26)
    assert "too many" in message
    assert peak < 2**20


def test_a_vocabulary_larger_than_any_published_one_is_read(write: Callable[..., Path]) -> None:
    count = 2**20
    tokens = b"".join(text(f"{number:x}") for number in range(count))
    path = write(key("t", 9, array_of(8, count) + tokens), key("s", 9, array_of(6, count)))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 4 * count)
    fields: dict[str, Any] = read_gguf_fields(path)
    assert [len(fields[name]) for name in ("t", "s")] == [count, count]
