"""A file as memory: its bytes are read when they are looked at, and dropped when told.

Knows bytes; knows neither formats nor tensors' names.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from exl_core.errors import WeightFileError

# Linux's MAP_NORESERVE, which Python 3.11 has no name for: without it a file that is larger than
# the machine's memory could not even be looked at.
_NO_RESERVE = 0x4000


class MappedFile:
    """All bytes of one file, mapped. Tensors from `view` keep the mapping alive."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = _private_map(file.fileno())
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise WeightFileError("cannot be mapped", where=path, got=error) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, offset: int, size_bytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Those bytes as `dtype`, in one dimension; a view that nobody may write to."""
        raw = self._bytes[offset : offset + size_bytes]
        if offset % dtype.itemsize:  # a view must be aligned
            raw = raw.clone()
        return raw.view(dtype)

    def prefetch(self, offset: int, size_bytes: int) -> None:
        """Those bytes will be wanted soon, whatever the order: the system may read on ahead.

        Page by page it would wait for the disk each time: a cold EXL2 file took three times as
        long.
        """
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, start, offset + size_bytes - start)

    def release(self, offset: int, size_bytes: int) -> None:
        """Those bytes are done with: whole pages of them leave this process's memory.

        They stay valid, and are fetched again if somebody looks.
        """
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _private_map(descriptor: int) -> mmap.mmap:
    """Writable, because torch has no tensors that are not; what is written stays in memory."""
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
