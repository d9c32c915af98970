"""What the machine allows, and what a process took of it: read bandwidth, peak memory.

Knows no models. The bandwidth is a ceiling, so the best of many passes counts, not their mean.
"""

from __future__ import annotations

import mmap
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

READ_BUFFER_BYTES = 256 * 2**20
"""Larger than the caches that a few cores have to themselves."""

_STATUS = Path("/proc/self/status")
_HUGE_PAGE_BYTES = 2 * 2**20


def read_bandwidth(
    threads: int, *, seconds: float = 0.3, buffer_bytes: int = READ_BUFFER_BYTES
) -> float:
    """Bytes a second that this many threads read from memory, each its own part of a buffer.

    A dot product of the buffer with itself: two operations for four bytes, far below what a core
    computes. Torch lets other Python threads run meanwhile; the caller keeps torch's own at one.
    """
    buffer = _huge_buffer(buffer_bytes)
    parts = buffer.chunk(threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        deadline = time.perf_counter() + seconds
        while best == 0.0 or time.perf_counter() < deadline:
            started = time.perf_counter()
            list(pool.map(_read, parts))
            best = max(best, buffer.nbytes / (time.perf_counter() - started))
    return best


def _read(part: Tensor) -> Tensor:
    return torch.dot(part, part)


def _huge_buffer(size_bytes: int) -> Tensor:
    """Written once, so that every page is there; in huge pages where the system gives them, as the
    kernels' weights are: with small ones the walks through the page tables are what is measured."""
    memory = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=size_bytes // 4).fill_(1.0)


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident, pages of mapped files included.

    From the kernel's own count where there is one: `getrusage` begins with the peak of the process
    that started this one.
    """
    if _STATUS.is_file():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if name == "VmHWM":
                return int(rest.split()[0]) * 1024  # "   12345 kB"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
