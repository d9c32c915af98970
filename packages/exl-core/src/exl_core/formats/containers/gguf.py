"""A GGUF model as a memory-mapped source of tensors: one file, or all parts of a split one.

The header comes from `tokenizer/gguf_fields.py`. This module checks that every tensor is inside the
file, and returns rows, decoded or as stored. It reverses shapes: the file lists the fastest
dimension first, all other modules expect rows first.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from exl_core.arch.fields import MAX_HEAD_DIM
from exl_core.arch.gguf_config import ROPE_FACTORS
from exl_core.errors import UnsupportedModelError, WeightFileError, WeightShapeError
from exl_core.formats.codecs.ggml.layout import PLAIN_DTYPES, REMOVED_TYPES, decode, row_bytes
from exl_core.formats.containers.mapped import MappedFile
from exl_core.formats.containers.source import StoredTensor, TensorSource
from exl_core.tokenizer.gguf_fields import GgufHeader, GgufTensorInfo, read_gguf_header

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)


class GgufSource(TensorSource):
    """One GGUF model; `metadata` are the fields of its first file as plain values.

    Any part of a split model may be named. Parts are found by llama.cpp's names, as in
    `model-00001-of-00003.gguf`, in one folder.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        parts = _parts(path)
        headers = [read_gguf_header(part) for part in parts]
        self.metadata = headers[0].fields
        self._path = parts[0]
        self._infos: dict[str, GgufTensorInfo] = {}
        self._files: dict[str, MappedFile] = {}
        self.tensors = {}
        for part, header in zip(parts, headers, strict=True):
            file = MappedFile(part)
            for info in header.tensors:
                if info.name in self._infos:
                    raise WeightFileError(
                        f"a tensor's name appears twice: {info.name!r}", where=part
                    )
                self._infos[info.name], self._files[info.name] = info, file
                self.tensors[info.name] = _declared(part, header, info)
        expected = self.metadata.get("split.tensors.count")
        if len(parts) > 1 and expected not in (None, len(self.tensors)):
            raise WeightFileError(
                "the parts of the split model do not belong together",
                where=self._path,
                expected=f"{expected} tensors",
                got=len(self.tensors),
            )

    def check_readable(self, name: str) -> None:
        kind = GGMLQuantizationType[self.tensors[name].storage]
        one_block = torch.zeros(1, GGML_QUANT_SIZES[kind][1], dtype=torch.uint8)
        if decode(one_block, kind) is None:
            raise UnsupportedModelError(
                f"tensor {name!r} is stored as {kind.name}, which cannot be decoded",
                where=self._path,
                next_step="Convert the model to another quantization, such as Q4_K_M or Q8_0.",
            )

    def read_raw(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        dtype = PLAIN_DTYPES.get(GGMLQuantizationType[tensor.storage], torch.uint8)
        raw = self._files[name].view(self._infos[name].offset, tensor.size_bytes, dtype)
        return raw.view(math.prod(tensor.shape[:-1]), -1)

    def read(self, name: str, rows: slice | Tensor) -> Tensor:
        tensor, raw = self.tensors[name], self.read_raw(name)
        is_vector = (
            len(tensor.shape) == 1
        )  # a vector may be one row of blocks, so it is decoded before it is indexed
        values = decode(raw if is_vector else raw[rows], GGMLQuantizationType[tensor.storage])
        assert values is not None, "the caller must call check_readable first"
        return values.view(-1)[rows] if is_vector else values.view(-1, tensor.shape[-1])

    def _location(self, name: str) -> tuple[MappedFile, int]:
        return self._files[name], self._infos[name].offset


def _parts(path: Path) -> list[Path]:
    """All files of the model that `path` is, or is a part of."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [
        f"{match['stem']}-{n:05d}-of-{match['count']}{match['ending']}" for n in range(1, count + 1)
    ]
    parts = [path.with_name(name) for name in names]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise WeightFileError(
            "parts of the split model are missing",
            where=path,
            expected=f"{count} files in one folder",
            got=f"no {', '.join(missing[:4])}",
            next_step="Fetch all parts of the model.",
        )
    return parts


def _declared(path: Path, header: GgufHeader, info: GgufTensorInfo) -> StoredTensor:
    try:
        kind = GGMLQuantizationType(info.type_id)
    except ValueError as error:
        removed = REMOVED_TYPES.get(info.type_id)
        raise UnsupportedModelError(
            f"tensor {info.name!r} has an unknown element type"
            if removed is None
            else f"tensor {info.name!r} is stored as {removed}, which llama.cpp has given up",
            where=path,
            got=info.type_id,
            next_step="Convert the model to another quantization, such as Q4_K_M or Q8_0.",
        ) from error
    shape = tuple(reversed(info.shape))
    if not shape or 0 in shape:
        raise WeightFileError(f"tensor {info.name!r} is empty", where=path, got=list(shape))
    columns = shape[-1]
    bytes_of_row = row_bytes(kind, columns)
    if bytes_of_row is None:
        raise WeightFileError(
            f"tensor {info.name!r} has {columns} columns, not a whole number of {kind.name} blocks",
            where=path,
        )
    size = math.prod(shape[:-1]) * bytes_of_row
    if info.offset + size > header.file_bytes:
        raise WeightFileError(
            f"tensor {info.name!r} lies outside the file",
            where=path,
            expected=f"at least {info.offset + size} bytes",
            got=f"{header.file_bytes} bytes",
            next_step="The download looks incomplete; fetch the file again.",
        )
    return StoredTensor(info.name, shape, kind.name, size, path)


def rope_factors(source: GgufSource) -> dict[str, tuple[float, ...]]:
    """Divisors of the RoPE frequencies, which some files store as tensors, by tensor name."""
    return {name: _factors(source, name) for name in ROPE_FACTORS if name in source.tensors}


def _factors(source: GgufSource, name: str) -> tuple[float, ...]:
    tensor = source.tensors[name]
    is_list = len(tensor.shape) == 1 and tensor.storage == "F32"
    if not is_list or tensor.shape[0] > MAX_HEAD_DIM // 2:
        raise WeightShapeError(
            f"tensor {name!r} is no list of factors",
            where=tensor.file,
            expected=f"one dimension of at most {MAX_HEAD_DIM // 2}, F32",
            got=f"{list(tensor.shape)}, {tensor.storage}",
        )
    values = source.read(name, slice(None)).to(torch.float32)
    return tuple(values.tolist())
