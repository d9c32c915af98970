"""Memory-mapped files: bytes are read on access, and released on request.

Knows bytes. Knows neither formats nor names of tensors.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from exl_core.errors import WeightFileError
from exl_core.files import open_regular

# Linux's MAP_NORESERVE, for which Python 3.11 has no constant. Without it, a file larger than the
# machine's memory could not be mapped.
_NO_RESERVE = 0x4000


class MappedFile:
    """Mapping of a whole file. Tensors returned by `view` keep the mapping alive."""

    def __init__(self, path: Path) -> None:
        try:
            with open_regular(path, WeightFileError) as file:
                self._map = _private_map(file.fileno())
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise WeightFileError("cannot be mapped", where=path, got=error) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._typed: dict[torch.dtype, Tensor] = {}

    def view(self, offset: int, size_bytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The bytes as a 1-d tensor of `dtype`. It may be a view of the file: do not write to
        it."""
        raw = self._bytes[offset : offset + size_bytes]
        if offset % dtype.itemsize:  # views must be aligned; a copy is
            raw = raw.clone()
        return raw.view(dtype)

    def shaped(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of this shape as a view of the file, whose `offset` is aligned for
        `dtype`. It takes one call of torch, which matters for files with many small tensors."""
        typed = self._typed.get(dtype)
        if typed is None:
            size = self._bytes.numel() // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = self._bytes[:size].view(dtype)
        strides, step = [0] * len(shape), 1
        for i in range(len(shape) - 1, -1, -1):
            strides[i], step = step, step * max(shape[i], 1)
        return typed.as_strided(shape, strides, offset // dtype.itemsize)

    def prefetch(self, offset: int, size_bytes: int) -> None:
        """Asks the system to read these bytes ahead, because they will be read soon, in any order.

        Without it, reading page by page waits for the disk each time: loading an EXL2 file that was
        not in the page cache took three times as long.
        """
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, start, offset + size_bytes - start)

    def release(self, offset: int, size_bytes: int) -> None:
        """Removes the whole pages within these bytes from this process's memory.

        The bytes stay valid: another access reads them again.
        """
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _private_map(descriptor: int) -> mmap.mmap:
    """A private writable mapping, because torch has no read-only tensors. Writes would not reach
    the file."""
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
