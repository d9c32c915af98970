"""Where tensors come from: the interface that files of every format offer.

A source knows stored names, shapes and bytes; it knows neither models nor which tensors are needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exl_core.weights.mapped import MappedFile

Progress = Callable[[int, int], None]  # gets bytes read and bytes in all

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file declares it. `storage` is the file's name for the element format."""

    name: str
    shape: tuple[int, ...]
    storage: str
    size_bytes: int
    file: Path

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class TensorSource(ABC):
    """Open weight files. Reading is safe from several threads."""

    format: str
    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def check_readable(self, name: str) -> None:
        """Raises `UnsupportedModelError` if the element type of a tensor cannot be decoded."""

    @abstractmethod
    def read_raw(self, name: str) -> Tensor:
        """A whole tensor as it is stored: the pieces of quantized matrices are integers, the rows
        of quantized GGUF tensors bytes, uint8 [rows, bytes of a row].

        No copy, unless its place in the file is not aligned for its type.
        """

    @abstractmethod
    def read(self, name: str, rows: slice | Tensor) -> Tensor:
        """Rows of the first dimension (a range, or an int64 index) as a contiguous tensor.

        float32, float16 or bfloat16 as stored; quantized storage is dequantized to float32 exactly
        as the format defines it. Nobody may write to it: it can be the file itself.
        """

    def prefetch(self, name: str) -> None:
        """All of this tensor will be read soon, once."""
        file, offset = self._place(name)
        file.prefetch(offset, self.tensors[name].size_bytes)

    def release(self, name: str, rows: slice | None = None) -> None:
        """These rows (None: all) have been read; they need not take memory any longer."""
        file, offset, size = self._span(name, rows or slice(None))
        file.release(offset, size)

    @abstractmethod
    def _place(self, name: str) -> tuple[MappedFile, int]:
        """The file that holds a tensor, and where it begins there."""

    def _span(self, name: str, rows: slice) -> tuple[MappedFile, int, int]:
        """The file, offset and size in bytes of consecutive rows; of no scalar."""
        tensor, (file, offset) = self.tensors[name], self._place(name)
        start, stop, _ = rows.indices(tensor.shape[0])
        bytes_of_row = tensor.size_bytes // max(1, tensor.shape[0])
        return file, offset + start * bytes_of_row, max(0, stop - start) * bytes_of_row
