"""A GGUF file as a source of tensors, memory-mapped.

The header comes from `tokenizer/gguf_fields.py`; this module checks that every tensor lies inside
the file and hands out decoded rows. Shapes are turned round on the way: the file lists the fastest
dimension first, everything above here has rows first.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from exl_core.codecs.gguf_blocks import PLAIN_DTYPES, decode, row_bytes
from exl_core.errors import UnsupportedModelError, WeightFileError, WeightShapeError
from exl_core.tokenizer.gguf_fields import GgufHeader, GgufTensorInfo, read_gguf_header
from exl_core.weights.source import StoredTensor, TensorSource


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
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def check_readable(self, name: str) -> None:
        kind = GGMLQuantizationType[self.tensors[name].storage]
        one_block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        if decode(one_block, kind) is None:
            raise UnsupportedModelError(
                f"tensor {name!r} is stored as {kind.name}, which cannot be decoded",
                where=self._path,
                next_step="Convert the model to another quantization, such as Q4_K_M or Q8_0.",
            )

    def read(self, name: str, rows: slice | Tensor) -> Tensor:
        tensor, info = self.tensors[name], self._infos[name]
        kind = GGMLQuantizationType[tensor.storage]
        raw = self._data[info.offset : info.offset + tensor.size_bytes]
        # A vector is a matrix with one value a row, so that rows of biases can be picked too.
        num_rows = tensor.shape[0] if kind in PLAIN_DTYPES else math.prod(tensor.shape[:-1])
        raw = raw.reshape(num_rows, -1)
        picked = np.array(raw[rows if isinstance(rows, slice) else rows.numpy()])
        values = decode(picked, kind)
        assert values is not None, "see check_readable"
        return values.reshape(picked.shape[0], *tensor.shape[1:])


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


def rope_factors(source: GgufSource) -> tuple[float, ...]:
    """Divisors of the RoPE frequencies, which Llama 3 files carry as a tensor; () for none."""
    tensor = source.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if len(tensor.shape) != 1 or tensor.storage != "F32":
        raise WeightShapeError(
            "tensor 'rope_freqs.weight' is no list of factors",
            where=tensor.file,
            expected="one dimension, F32",
            got=f"{list(tensor.shape)}, {tensor.storage}",
        )
    values = source.read("rope_freqs.weight", slice(None)).to(torch.float32)
    return tuple(values.tolist())
