"""Measurements on the host: read bandwidth of memory, peak memory of the process.

Knows no models. The bandwidth is an upper bound, so the best of many passes counts, not the mean.
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
"""Size of the buffer that is read. Larger than the private caches of a few cores together."""

_STATUS = Path("/proc/self/status")
_HUGE_PAGE_BYTES = 2 * 2**20


def read_bandwidth(
    threads: int, *, seconds: float = 0.3, buffer_bytes: int = READ_BUFFER_BYTES
) -> float:
    """Bytes per second that `threads` threads read from memory, each from its own part of a buffer.

    Each thread computes the dot product of its part with itself. That is two operations per four
    bytes, far below the compute limit of a core. Torch releases the interpreter lock meanwhile. The
    caller must keep torch's own thread count at one.
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
    """Allocates a buffer and writes it once, so that every page is mapped.

    Uses huge pages where the system has them, as the weights of the kernels do. With small pages,
    page-table walks would dominate the measurement."""
    memory = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=size_bytes // 4).fill_(1.0)


def peak_memory_bytes() -> int:
    """Peak resident memory of this process, including pages of mapped files.

    Prefers VmHWM of /proc/self/status: the value of `getrusage` starts at the peak of the parent
    process.
    """
    if _STATUS.is_file():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if name == "VmHWM":
                return int(rest.split()[0]) * 1024  # "   12345 kB"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
