"""Where tensors come from: the interface that files of every format offer.

A source knows stored names, shapes and bytes; it knows neither models nor which tensors are needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


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
        """A whole tensor as it is stored, without a copy: the pieces of quantized matrices are
        integers, the rows of quantized GGUF tensors bytes, uint8 [rows, bytes of a row]."""

    @abstractmethod
    def read(self, name: str, rows: slice | Tensor) -> Tensor:
        """Rows of the first dimension (a range, or an int64 index) as a contiguous tensor.

        float32, float16 or bfloat16 as stored; quantized storage is dequantized to float32 exactly
        as the format defines it. Nobody may write to it: it can be the file itself.
        """

    @abstractmethod
    def prefetch(self, name: str) -> None:
        """All of this tensor will be read soon, once."""

    @abstractmethod
    def release(self, name: str, rows: slice | None = None) -> None:
        """These rows (None: all) have been read; they need not take memory any longer."""
