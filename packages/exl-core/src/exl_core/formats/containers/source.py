"""Interface of a tensor source: weight files of any format.

A source knows stored names, shapes and bytes. It knows neither models nor which tensors are needed.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from exl_core.arch.modules import Container
from exl_core.formats.containers.mapped import MappedFile

Progress = Callable[[int, int], None]  # called with (bytes read, total bytes)

STACKED = 2  # dimensions of a matrix; a tensor with more holds several
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as declared in a file. `storage` is the file's name for the element format."""

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

    @property
    def num_rows(self) -> int:
        """Rows of a matrix, or values of a vector. The rows of stacked matrices are counted on."""
        return prod(self.shape[:-1] if len(self.shape) > STACKED else self.shape[:1])


class TensorSource(ABC):
    """Open weight files. Reading is thread-safe."""

    format: Container
    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def check_readable(self, name: str) -> None:
        """Raises `UnsupportedModelError` if the element type of a tensor cannot be decoded."""

    @abstractmethod
    def read_raw(self, name: str) -> Tensor:
        """A whole tensor as stored. Packed tensors of EXL2 and GPTQ are integers; quantized GGUF
        tensors are uint8 [rows, bytes per row].

        It is a view of the file, or a copy if its offset is not aligned for its dtype.
        """

    @abstractmethod
    def read(self, name: str, rows: slice | Tensor) -> Tensor:
        """Rows (a range, or an int64 index) as a contiguous tensor. The rows of stacked matrices
        are counted on: all but the last dimension are one.

        float32, float16 or bfloat16 as stored; quantized storage is dequantized to float32 exactly
        as the format defines. It may be a view of the file: do not write to it.
        """

    def prefetch(self, name: str, rows: slice | None = None) -> None:
        """Starts reading rows of a tensor (None: all) ahead, because all of them will be read soon,
        once."""
        file, offset, size = self._span(name, rows or slice(None))
        file.prefetch(offset, size)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Releases the process's memory for these rows (None: all), after they have been read."""
        file, offset, size = self._span(name, rows or slice(None))
        file.release(offset, size)

    def prefetch_all(self, names: Iterable[str]) -> None:
        """`prefetch` of whole tensors, with one call of the system for successive ones."""
        for file, offset, size in self._joint_spans(names):
            file.prefetch(offset, size)

    def release_all(self, names: Iterable[str]) -> None:
        """`release` of whole tensors, with one call of the system for successive ones."""
        for file, offset, size in self._joint_spans(names):
            file.release(offset, size)

    def _joint_spans(self, names: Iterable[str]) -> list[tuple[MappedFile, int, int]]:
        """File, offset and size of ranges that cover whole tensors. Between the tensors of a range
        are less bytes than a page."""
        places: dict[MappedFile, list[tuple[int, int]]] = {}
        for name in names:
            file, offset = self._location(name)
            places.setdefault(file, []).append((offset, offset + self.tensors[name].size_bytes))
        found: list[tuple[MappedFile, int, int]] = []
        for file, spans in places.items():
            spans.sort()
            first, last = spans[0]
            for start, stop in spans:
                if start >= last + mmap.PAGESIZE:
                    found.append((file, first, last - first))
                    first = start
                last = max(last, stop)
            found.append((file, first, last - first))
        return found

    @abstractmethod
    def _location(self, name: str) -> tuple[MappedFile, int]:
        """File and byte offset of a tensor."""

    def _span(self, name: str, rows: slice) -> tuple[MappedFile, int, int]:
        """File, offset and size in bytes of consecutive rows. The tensor must not be a scalar."""
        tensor, (file, offset) = self.tensors[name], self._location(name)
        start, stop, _ = rows.indices(tensor.num_rows)
        bytes_of_row = tensor.size_bytes // max(1, tensor.num_rows)
        return file, offset + start * bytes_of_row, max(0, stop - start) * bytes_of_row
