"""A checkpoint as the model wants it: its own tensor names, rows in its own order.

Owns what differs between files of one architecture: other names, rows permuted for another RoPE
convention, norms stored less one. Every tensor that is asked for is checked: present, of the
expected shape, and finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exl_core.arch.key_map import (
    checkpoint_names,
    expected_tensors,
    gguf_name,
    packed_together,
    rotated_head_count,
)
from exl_core.arch.quantization import Quantization
from exl_core.arch.spec import ModelConfig, Norm
from exl_core.errors import (
    MissingTensorError,
    UnsupportedModelError,
    WeightShapeError,
    WeightValueError,
)
from exl_core.weights.quantized import QuantizedMatrix, dequantize, find_quantized
from exl_core.weights.source import StoredTensor, TensorSource

MATRIX = 2  # dimensions
CHUNK_VALUES = 1 << 18  # decoded at a time: 1 MiB of float32, which stays in cache
RUNTIME_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a tensor, in the order of the model; `size_bytes` is their size in the file."""

    first_row: int
    values: Tensor
    size_bytes: int


class Checkpoint:
    """The tensors of one model, by the names of `arch/key_map.py`."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        quantization: Quantization | None = None,
    ) -> None:
        self._source = source
        self._config = config
        self._quantization = quantization
        self._quantized: dict[str, QuantizedMatrix] = {}
        self.stored: dict[str, StoredTensor] = {
            name: self._find(name, shape) for name, shape in expected_tensors(config).items()
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of all needed tensors in the files."""
        return sum(tensor.size_bytes for tensor in self.stored.values())

    @property
    def used_names(self) -> set[str]:
        """Names in the files of all tensors that the model needs."""
        pieces = {name for m in self._quantized.values() for name in m.parts.values()}
        return pieces | {tensor.name for tensor in self.stored.values()}

    @property
    def packed_bytes(self) -> int:
        """Bytes that the weights will take in memory."""
        return sum(
            tensor.num_values * self.dtype(*packed_together(name)).itemsize
            for name, tensor in self.stored.items()
        )

    def dtype(self, *names: str) -> torch.dtype:
        """What these tensors are kept in when packed together: as stored, quantized as float16."""
        dtypes = {RUNTIME_DTYPES.get(self.stored[n].storage, torch.float16) for n in names}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def chunks(self, name: str, dtype: torch.dtype) -> Iterator[Chunk]:
        """The rows of a matrix or a bias, a few at a time (multiples of 16), as `dtype`."""
        tensor = self.stored[name]
        num_rows = tensor.shape[0]
        values_a_row = max(1, tensor.num_values // num_rows)
        step = max(16, CHUNK_VALUES // values_a_row // 16 * 16)
        order = self._row_order(name)
        matrix = self._quantized.get(name)
        whole = dequantize(self._source, matrix, self._quantization) if matrix else None
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            rows = slice(start, stop) if order is None else order[start:stop]
            if whole is None:
                values = self._source.read(tensor.name, rows)
            else:
                values = whole[rows].contiguous()
            _check_finite(tensor, values, "The file is damaged or its conversion failed")
            if values.dtype is not dtype:
                values = values.to(dtype)
                _check_finite(tensor, values, f"As {dtype} they overflow")
            yield Chunk(start, values, tensor.size_bytes * (stop - start) // num_rows)

    def vector(self, name: str) -> Tensor:
        """A bias, float32 [rows]."""
        return torch.cat([chunk.values for chunk in self.chunks(name, torch.float32)])

    def norm(self, name: str) -> Tensor:
        """A norm's factors, float32 [rows], whole."""
        weight = self.vector(name)
        if weight.dim() == MATRIX:
            if not torch.equal(weight, weight[:1].expand_as(weight)):
                raise UnsupportedModelError(
                    f"tensor {name!r} differs between heads", where=self.stored[name].file
                )
            weight = weight[0].contiguous()
        arch = self._config.arch
        is_folded = self._source.format == "gguf" and arch.is_gguf_norm_folded
        return weight + 1.0 if arch.norm is Norm.RMS_PLUS_ONE and not is_folded else weight

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        arch, tensors = self._config.arch, self._source.tensors
        is_gguf = self._source.format == "gguf"
        names = [gguf_name(arch, name)] if is_gguf else checkpoint_names(arch, name)
        found = next((tensors[n] for n in names if n in tensors), None)
        if found is None and len(shape) == MATRIX:
            for stem in (n.removesuffix(".weight") for n in names):
                matrix = find_quantized(self._source, stem, shape)
                if matrix is not None:
                    self._quantized[name] = matrix
                    return matrix.stored
        if found is None:
            raise MissingTensorError(
                f"tensor {names[0]!r} is missing",
                where=self._place(),
                expected=f"{list(shape)}, which a {arch.name} model of this configuration has",
                got=f"{len(tensors)} other tensors",
                next_step="'exl inspect model PATH --tensors' shows what there is.",
            )
        self._source.check_readable(found.name)
        if found.shape != shape and not _is_repeated_head_norm(name, found, shape):
            raise WeightShapeError(
                f"tensor {found.name!r} has the wrong shape",
                where=found.file,
                expected=list(shape),
                got=list(found.shape),
                next_step="The weights and the configuration are not of one model.",
            )
        return found

    def _place(self) -> Path | None:
        """The file, or the folder of the files."""
        files = {tensor.file for tensor in self._source.tensors.values()}
        return files.pop() if len(files) == 1 else files.pop().parent if files else None

    def _row_order(self, name: str) -> Tensor | None:
        """Rows to read, in order, or None for file order.

        GGUF files of some families keep each rotated pair in neighboring rows (2i, 2i + 1); ours
        are half the rotated part apart (i, i + R/2). Rows that are not rotated stay where they are.
        """
        heads = rotated_head_count(self._config, name)
        if (
            not heads
            or self._source.format != "gguf"
            or not self._config.arch.is_gguf_rope_interleaved
        ):
            return None
        rows = torch.arange(heads * self._config.head_dim).view(heads, -1)
        rotated, rest = rows.split_with_sizes(
            [self._config.rope.rotary_dim, rows.shape[1] - self._config.rope.rotary_dim], dim=1
        )
        rotated = rotated.view(heads, -1, 2).transpose(1, 2).reshape(heads, -1)
        return torch.cat([rotated, rest], dim=1).view(-1)


def _is_repeated_head_norm(name: str, found: StoredTensor, shape: tuple[int, ...]) -> bool:
    """EXL2 files store the norm of each head's queries and keys once for every head."""
    return name.endswith(("q_norm.weight", "k_norm.weight")) and found.shape[1:] == shape


def _check_finite(tensor: StoredTensor, values: Tensor, cause: str) -> None:
    # A sum is not finite if any value is not; only then is it worth looking at each.
    if torch.isfinite(values.sum(dtype=torch.float32)) or torch.isfinite(values).all():
        return
    bad = int((~torch.isfinite(values)).sum())
    raise WeightValueError(
        f"tensor {tensor.name!r} holds {bad} values that are NaN or infinite",
        where=tensor.file,
        next_step=f"{cause}; get the model from another source.",
    )
