"""A GGUF file as a memory-mapped source of tensors.

The header comes from `tokenizer/gguf_fields.py`. This module checks that every tensor is inside the
file, and returns rows, decoded or as stored. It reverses shapes: the file lists the fastest
dimension first, all other modules expect rows first.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from exl_core.arch.fields import MAX_HEAD_DIM
from exl_core.arch.gguf_config import ROPE_FACTORS
from exl_core.errors import UnsupportedModelError, WeightFileError, WeightShapeError
from exl_core.formats.codecs.ggml.layout import PLAIN_DTYPES, decode, row_bytes
from exl_core.formats.containers.mapped import MappedFile
from exl_core.formats.containers.source import StoredTensor, TensorSource
from exl_core.tokenizer.gguf_fields import GgufHeader, GgufTensorInfo, read_gguf_header


class GgufSource(TensorSource):
    """One GGUF file; `metadata` are its fields as plain values."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.metadata = header.fields
        self._path = path
        self._infos = {info.name: info for info in header.tensors}
        if len(self._infos) != len(header.tensors):
            raise WeightFileError("a tensor's name appears twice", where=path)
        self.tensors = {info.name: _declared(path, header, info) for info in header.tensors}
        self._data = MappedFile(path)

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
        raw = self._data.view(self._infos[name].offset, tensor.size_bytes, dtype)
        return raw.view(math.prod(tensor.shape[:-1]), -1)

    def read(self, name: str, rows: slice | Tensor) -> Tensor:
        tensor, raw = self.tensors[name], self.read_raw(name)
        is_vector = (
            len(tensor.shape) == 1
        )  # a vector may be one row of blocks, so it is decoded before it is indexed
        values = decode(raw if is_vector else raw[rows], GGMLQuantizationType[tensor.storage])
        assert values is not None, "the caller must call check_readable first"
        return values.view(-1)[rows] if is_vector else values.view(-1, *tensor.shape[1:])

    def _location(self, name: str) -> tuple[MappedFile, int]:
        return self._data, self._infos[name].offset


def _declared(path: Path, header: GgufHeader, info: GgufTensorInfo) -> StoredTensor:
    try:
        kind = GGMLQuantizationType(info.type_id)
    except ValueError as error:
        raise UnsupportedModelError(
            f"tensor {info.name!r} has an unknown element type",
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
