"""Header of a GGUF file: metadata as plain Python values, and the offsets of tensors.

Owns only the byte layout of the header. The meaning of keys belongs to `gguf_vocab.py` and
`exl_core.arch`, the decoding of tensor types to `exl_core.formats`. This reader replaces the `gguf`
package, which makes one numpy array per string: 11 s for a vocabulary of 262144 tokens, against
0.1 s here.

Every length in the file is untrusted. It is compared with the number of remaining bytes before
anything of that size is allocated. A sparse file has many bytes at no cost, and a byte of an array
becomes a Python object. Therefore all arrays together, all strings together, the keys and the
tensors are also bounded by what a vocabulary and a model can need.

Layout, little-endian: magic 'GGUF', version u32, tensor count u64, key count u64; then per key a
string, a type u32 and a value; then per tensor a string, the number of dimensions u32, the
dimensions u64 (fastest first), a type u32 and an offset u64 from the start of the data, which
begins at the next multiple of `general.alignment`. A string is a length u64 and UTF-8; an array is
an element type u32, a count u64 and the elements.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import WeightFileError
from exl_core.files import LFS_HEAD, check_no_lfs_pointer, open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
MAX_ARRAY_DEPTH = 4
# The largest vocabularies have 262144 tokens with scores and types, and 514906 merges: 1.3 million
# elements and 10 MiB of text.
MAX_ELEMENTS = 4 * 2**20  # of all arrays together
MAX_TEXT_BYTES = 64 * 2**20  # of all strings together
MAX_KEYS = 2**16
MAX_TENSORS = 2**18

# Value types as `struct` codes: the integers from 8 to 64 bits, the floats, bool.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING = 8
_ARRAY = 9
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_NEXT_STEP = "The file looks truncated or damaged; download or convert it again"


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """Tensor as declared by the header, not checked against the data."""

    name: str
    shape: tuple[int, ...]  # as in the file: fastest dimension first
    type_id: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    version: int
    fields: dict[str, object]
    tensors: tuple[GgufTensorInfo, ...]
    data_start: int
    file_bytes: int


def read_gguf_fields(path: Path) -> dict[str, object]:
    """Reads the metadata: ints, floats, bools, strings, and lists of these."""
    return _open_and_read(path, with_tensors=False).fields


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the metadata and the tensor table."""
    return _open_and_read(path, with_tensors=True)


def _open_and_read(path: Path, *, with_tensors: bool) -> GgufHeader:
    try:
        with open_regular(path, WeightFileError) as file:
            size = file.seek(0, 2)
            if size == 0:
                raise WeightFileError("the file is empty", where=path, next_step=_NEXT_STEP)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, size, path).header(with_tensors=with_tensors)
    except OSError as error:
        raise WeightFileError(
            "cannot read the file", where=path, got=error.strerror or error
        ) from error


class _Reader:
    """Cursor over the mapped file. `position` only increases."""

    def __init__(self, data: mmap.mmap, size: int, path: Path) -> None:
        self.data = data
        self.size = size
        self.path = path
        self.position = 0
        self.elements_left = MAX_ELEMENTS
        self.text_bytes_left = MAX_TEXT_BYTES

    def header(self, *, with_tensors: bool) -> GgufHeader:
        version, tensor_count, key_count = self._preamble()
        fields: dict[str, object] = {}
        for _ in range(key_count):
            key = self._string("a metadata key")
            if key in fields:
                raise self._error(f"metadata key {key!r} appears twice")
            fields[key] = self._value(self._scalar("I", key), key)
        tensors: list[GgufTensorInfo] = []
        if with_tensors:
            tensors = [self._tensor() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._error(
                "general.alignment is not usable", expected="a multiple of 8", got=alignment
            )
        start = -(-self.position // alignment) * alignment if with_tensors else 0
        moved = tuple(
            GgufTensorInfo(info.name, info.shape, info.type_id, info.offset + start)
            for info in tensors
        )
        return GgufHeader(version, fields, moved, start, self.size)

    def _preamble(self) -> tuple[int, int, int]:
        magic = self.data[:4]
        if magic != MAGIC:
            check_no_lfs_pointer(self.data[: len(LFS_HEAD)], WeightFileError, self.path)
            raise self._error("this is not a GGUF file", expected=f"magic {MAGIC!r}", got=magic)
        self.position = 4
        version = self._scalar("I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise WeightFileError(
                "unsupported GGUF version",
                where=self.path,
                expected=" or ".join(map(str, VERSIONS)),
                got=f"{version} (a big-endian file)" if swapped else version,
                next_step="Convert the model again with a current converter",
            )
        tensor_count = self._scalar("Q", "the number of tensors")
        key_count = self._scalar("Q", "the number of metadata keys")
        self._need(key_count * _MIN_KEY_BYTES, f"the list of {key_count} metadata keys")
        self._need(tensor_count * _MIN_TENSOR_BYTES, f"the list of {tensor_count} tensors")
        for what, count, most in (
            ("metadata keys", key_count, MAX_KEYS),
            ("tensors", tensor_count, MAX_TENSORS),
        ):
            if count > most:
                raise self._error(
                    f"the file has too many {what}", expected=f"at most {most}", got=count
                )
        return version, tensor_count, key_count

    def _value(self, type_id: int, key: str, depth: int = 0) -> object:
        code = _SCALARS.get(type_id)
        if code is not None:
            self._need(struct.calcsize("<" + code), f"the value of {key!r}")
            (value,) = struct.unpack_from("<" + code, self.data, self.position)
            self.position += struct.calcsize("<" + code)
            return value
        if type_id == _STRING:
            return self._string(f"the value of {key!r}")
        if type_id == _ARRAY and depth < MAX_ARRAY_DEPTH:
            return self._array(key, depth)
        raise self._error(f"{key!r} has an unknown value type", expected="0 to 12", got=type_id)

    def _array(self, key: str, depth: int) -> list[object]:
        type_id = self._scalar("I", key)
        count = self._scalar("Q", key)
        what = f"the {count} elements of {key!r}"
        if count > self.elements_left:
            raise self._error(
                f"{what} are more than a vocabulary needs",
                expected=f"at most {MAX_ELEMENTS} elements in all arrays",
                got=f"{count} after {MAX_ELEMENTS - self.elements_left} others",
            )
        self.elements_left -= count
        code = _SCALARS.get(type_id)
        if code is not None:
            size = count * struct.calcsize("<" + code)
            self._need(size, what)
            values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
            self.position += size
            return list(values)
        self._need(count * (8 if type_id == _STRING else 12), what)
        if type_id == _STRING:
            return self._strings(count, key)
        return [self._value(type_id, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[object]:
        """Reads an array of strings. This is the hot loop: vocabularies have 262144 tokens."""
        data, position = self.data, self.position
        end = min(self.size, position + 8 * count + self.text_bytes_left)
        length_at = struct.Struct("<Q").unpack_from
        values: list[object] = []
        append = values.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if position > end:
                    self.position = start
                    self.text_bytes_left = end - start
                    self._need_text(position - start, f"string {len(values)} of {key!r}")
                append(str(data[start:position], "utf-8"))
        except struct.error as error:
            raise self._error(f"the file ends inside {key!r}", got=f"{self.size} bytes") from error
        except UnicodeDecodeError as error:
            raise self._error(f"string {len(values)} of {key!r} is not UTF-8") from error
        self.text_bytes_left -= position - self.position - 8 * count
        self.position = position
        return values

    def _string(self, what: str) -> str:
        length = self._scalar("Q", what)
        self._need_text(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8", got=raw[:40]) from error

    def _tensor(self) -> GgufTensorInfo:
        name = self._string("a tensor's name")
        what = f"the entry of tensor {name!r}"
        dimensions = self._scalar("I", what)
        if dimensions > MAX_DIMENSIONS:
            raise self._error(
                f"tensor {name!r} has too many dimensions",
                expected=f"at most {MAX_DIMENSIONS}",
                got=dimensions,
            )
        shape = tuple(self._scalar("Q", what) for _ in range(dimensions))
        type_id = self._scalar("I", what)
        return GgufTensorInfo(name, shape, type_id, self._scalar("Q", what))

    def _scalar(self, code: str, what: str) -> int:
        size = struct.calcsize("<" + code)
        self._need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return int(value)

    def _need(self, length: int, what: str) -> None:
        left = self.size - self.position
        if length > left:
            raise self._error(
                f"the file ends inside {what}", expected=f"{length} bytes more", got=f"{left} left"
            )

    def _need_text(self, length: int, what: str) -> None:
        self._need(length, what)
        self.text_bytes_left -= length
        if self.text_bytes_left < 0:
            raise self._error(
                f"the file has too much text, up to {what}",
                expected=f"at most {MAX_TEXT_BYTES} bytes in all strings",
            )

    def _error(self, what: str, *, expected: object = None, got: object = None) -> WeightFileError:
        return WeightFileError(
            what, where=self.path, expected=expected, got=got, next_step=_NEXT_STEP
        )
