"""Memory that this process may still allocate, on the machine or on a GPU.

For the machine it is known on Linux only; elsewhere the result is None.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def malloc_trim() -> Callable[[int], object] | None:
    """glibc's `malloc_trim`, which returns freed memory to the machine; None without glibc.

    A call takes 30 to 200 ms after large frees and does not hold the GIL.
    """
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def return_freed_memory(devices: Iterable[torch.device]) -> None:
    """Returns memory that this process has freed to the machine and to the GPUs of `devices`.

    The allocators of libc and of torch keep freed memory for later.
    """
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
    trim = malloc_trim()
    if trim is not None:
        trim(0)


def free_memory_bytes(device: torch.device) -> int | None:
    """Free bytes of `device`. For a GPU this includes memory that torch's allocator holds
    unused, and excludes memory that caches of this process have yet to take."""
    if device.type == "cpu":
        return available_memory_bytes()
    import torch

    from exl_core.ops.backends.cuda.growing import promised_bytes

    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int(free) + int(held) - promised_bytes(device))


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """The smaller of the machine's available memory and the rest of the control group's limit (the
    limit of a container)."""
    known = [size for size in (_machine_bytes(meminfo), _cgroup_bytes(cgroup)) if size is not None]
    return min(known, default=None)


def _machine_bytes(meminfo: Path) -> int | None:
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024  # "   12345 kB"
    return None


def _cgroup_bytes(cgroup: Path) -> int | None:
    """Bytes left in a cgroup of version 2. The page cache is reclaimable, so it does not count as
    used here, although the kernel counts it."""
    limit_file, usage_file = cgroup / "memory.max", cgroup / "memory.current"
    if not limit_file.is_file() or not usage_file.is_file():
        return None
    limit = limit_file.read_text(encoding="ascii").strip()
    if limit == "max":
        return None
    used = int(usage_file.read_text(encoding="ascii"))
    stat_file = cgroup / "memory.stat"
    if stat_file.is_file():
        for line in stat_file.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name in ("inactive_file", "active_file"):
                used -= int(count)
    return max(0, int(limit) - used)


def zeros_when_touched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are not resident until written. `torch.zeros` would write all of them at once.

    `torch.empty` is lazy too, but may return memory with an earlier tensor's values. NaN times a
    weight of zero is NaN, so attention that masks by multiplication would sometimes be wrong.
    """
    import torch

    count = prod(shape)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
