"""Safetensors files, single or sharded, as a source of tensors.

The header is checked against the file before anything is read (format: safetensors documentation,
"Format"): 8 bytes of header length, a JSON header, then the data that it refers to. The safetensors
library also validates every file before it is mapped.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exl_core.arch.hf_config import directory_advice
from exl_core.errors import ModelNotFoundError, UnsupportedModelError, WeightFileError
from exl_core.files import (
    LFS_HEAD,
    check_no_lfs_pointer,
    open_regular,
    parse_json_object,
    read_json_object,
)
from exl_core.formats.containers.mapped import MappedFile
from exl_core.formats.containers.source import (
    PLAIN_TYPES,
    STACKED,
    StoredTensor,
    TensorSource,
)

HEADER_LIMIT_BYTES = 100_000_000  # the library's own limit
INDEX_NAME = "model.safetensors.index.json"
ELEMENT_TYPES = PLAIN_TYPES | {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class SafetensorsSource(TensorSource):
    """All safetensors files of one checkpoint."""

    format = "safetensors"

    def __init__(self, directory: Path, *, has_index: bool = True) -> None:
        """`has_index`: use the index file if there is one. False ignores it, because it may be
        left over from the source of a conversion."""
        self.tensors: dict[str, StoredTensor] = {}
        self._offsets: dict[str, int] = {}
        self._files: dict[Path, MappedFile] = {}
        for path in checkpoint_files(directory, has_index=has_index):
            for tensor, offset in read_header(path):
                if tensor.name in self.tensors:
                    raise WeightFileError(
                        f"tensor {tensor.name!r} is also in {self.tensors[tensor.name].file.name}",
                        where=path,
                    )
                self.tensors[tensor.name] = tensor
                self._offsets[tensor.name] = offset
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise WeightFileError("cannot be opened", where=path, got=error) from error
            self._files[path] = MappedFile(path)

    def check_readable(self, name: str) -> None:
        tensor = self.tensors[name]
        if tensor.storage not in PLAIN_TYPES:
            raise UnsupportedModelError(
                f"tensor {name!r} has an element type that weights cannot have",
                where=tensor.file,
                expected=", ".join(PLAIN_TYPES),
                got=tensor.storage,
            )

    def read_raw(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        dtype = ELEMENT_TYPES.get(tensor.storage, torch.uint8)
        file, offset = self._files[tensor.file], self._offsets[name]
        if offset % dtype.itemsize == 0 and tensor.num_values * dtype.itemsize == tensor.size_bytes:
            return file.shaped(offset, tensor.shape, dtype)
        raw = file.view(offset, tensor.size_bytes, dtype)
        return raw.view(tensor.shape) if tensor.num_values == raw.numel() else raw

    def read(self, name: str, rows: slice | Tensor) -> Tensor:
        tensor = self.tensors[name]
        is_stacked = len(tensor.shape) > STACKED
        columns = tensor.shape[-1:] if is_stacked else tensor.shape[1:]
        if isinstance(rows, Tensor):
            return self.read_raw(name).view(tensor.num_rows, *columns)[rows]
        # Views only the bytes of these rows: an unaligned view is copied, so it must be small.
        file, offset, size = self._span(name, rows)
        values = file.view(offset, size, ELEMENT_TYPES[tensor.storage])
        return values.view(len(range(tensor.num_rows)[rows]), *columns)

    def _location(self, name: str) -> tuple[MappedFile, int]:
        return self._files[self.tensors[name].file], self._offsets[name]


def checkpoint_files(directory: Path, *, has_index: bool = True) -> list[Path]:
    """Weight files of a checkpoint: those listed in its index, or all if there is no index."""
    index = directory / INDEX_NAME
    if not has_index or not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(
                "directory holds no *.safetensors file",
                where=directory,
                next_step=_advice(directory),
            )
        return files
    entries = read_json_object(index, WeightFileError, HEADER_LIMIT_BYTES).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise WeightFileError("is not a weight index: no 'weight_map'", where=index)
    # A file name with a folder could refer to any file on the machine.
    odd = [n for n in entries.values() if not isinstance(n, str) or Path(n).name != n]
    if odd:
        raise WeightFileError("lists a file outside its own folder", where=index, got=repr(odd[0]))
    names = set(entries.values())
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing:
        raise WeightFileError(
            f"lists {len(names)} files, {len(missing)} of them missing",
            where=index,
            got=f"no {missing[0]}",
            next_step="Download the missing files.",
        )
    return sorted(directory / name for name in names)


def _advice(directory: Path) -> str:
    pickles = sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
    if pickles:
        return (
            f"{pickles[0].name} is a pickle, which can run code when read, and is refused; "
            "'exl convert --from-bin DIR -o OUT' makes safetensors files of it in a separate "
            "process, or download the safetensors files."
        )
    return directory_advice(directory)


def read_header(path: Path) -> list[tuple[StoredTensor, int]]:
    """Tensors that a file declares, with their offsets. Checks that each is inside the file and
    that its size matches its shape."""
    try:
        with open_regular(path, WeightFileError) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            is_whole = len(prefix) == 8 and length <= min(size - 8, HEADER_LIMIT_BYTES)
            text = file.read(length if is_whole else len(LFS_HEAD))
    except OSError as error:
        raise WeightFileError("cannot be read", where=path, got=error.strerror or error) from error
    if not is_whole:
        check_no_lfs_pointer(prefix + text, WeightFileError, path)
        raise WeightFileError(
            "header is cut off",
            where=path,
            expected=f"{length} bytes of header" if len(prefix) == 8 else "8 bytes of length",
            got=f"a file of {size} bytes",
            next_step="The download looks incomplete; fetch the file again.",
        )
    header = parse_json_object(text, WeightFileError, f"{path}, header")
    header.pop("__metadata__", None)
    return [_declared(path, name, entry, 8 + length, size) for name, entry in header.items()]


def _declared(
    path: Path, name: str, entry: object, data_start: int, file_bytes: int
) -> tuple[StoredTensor, int]:
    try:
        storage, shape = str(entry["dtype"]), tuple(entry["shape"])  # type: ignore[index]
        start, stop = entry["data_offsets"]  # type: ignore[index]
        sane = True
        for n in (*shape, start, stop):  # a loop: `all` of a generator takes twice as long
            if not isinstance(n, int) or not 0 <= n < 2**63:
                sane = False
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane or start > stop:
        raise WeightFileError(f"entry of tensor {name!r} is malformed", where=path)
    data_bytes = file_bytes - data_start
    if stop > data_bytes:
        raise WeightFileError(
            f"tensor {name!r} lies outside the file",
            where=path,
            expected=f"data up to byte {stop}",
            got=f"{data_bytes} bytes of data",
            next_step="The download looks incomplete; fetch the file again.",
        )
    dtype = ELEMENT_TYPES.get(storage)
    if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
        raise WeightFileError(
            f"tensor {name!r} has a size that does not fit its shape",
            where=path,
            expected=f"{math.prod(shape) * dtype.itemsize} bytes for {storage} {list(shape)}",
            got=f"{stop - start} bytes",
        )
    return StoredTensor(name, shape, storage, stop - start, path), data_start + start
