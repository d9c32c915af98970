"""GPU memory that grows in place: a range of addresses, of which a part has memory behind it.

Uses the driver's virtual memory interface (`cuMemAddressReserve`, `cuMemMap`). The addresses never
change, so tensors, pointers and captured graphs stay valid while the memory grows. Knows bytes
only, neither pages nor caches.

The rest of a range counts as promised. `promised_bytes` is what other allocations of this process
must leave free, so that every buffer can grow to its full size.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from ctypes import Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from exl_core.errors import DeviceError, OutOfMemoryError

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MIB = 1 << 20


class Range:
    """A reserved range of addresses. torch keeps it alive as long as a tensor refers to it."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class Memory(Protocol):
    """The calls that a buffer makes: to the driver, or to a stand-in in tests."""

    device: torch.device
    granule: int
    """All mapped sizes and offsets are multiples of these bytes."""

    def reserve(self, size: int) -> int: ...
    def map(self, address: int, size: int) -> None: ...
    def tensor(self, whole: Range) -> Tensor: ...
    def release(self, whole: Range, parts: Iterable[tuple[int, int]]) -> None: ...


class GrowingBuffer:
    """`size` bytes on a GPU, zero until written, whose memory grows from the start.

    The last `tail` bytes have memory from the beginning. Memory is freed with the last tensor.
    """

    def __init__(self, memory: Memory, size: int, tail: int) -> None:
        self._memory = memory
        self._granule = granule = memory.granule
        self.size = size
        range_bytes = _round_up(size, granule)
        tail_from = (size - tail) // granule * granule
        self._limit = tail_from or range_bytes
        self._range = Range(memory.reserve(range_bytes), range_bytes)
        self._parts: list[tuple[int, int]] = []
        _release_at_end(memory, self._range, self._parts)
        self._head = granule if tail_from else range_bytes
        self._map(0, self._head)
        if tail_from:
            self._map(tail_from, range_bytes)
        self.bytes = memory.tensor(self._range)[:size]
        for address, length in self._parts:
            self._clear(address - self._range.address, length)
        _BUFFERS.add(self)

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def grown(self) -> int:
        """Bytes from the start that have memory."""
        return self.size if self._head == self._limit else self._head

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(length for _, length in self._parts)

    @property
    def promised_bytes(self) -> int:
        """Bytes that the buffer may still take."""
        return self._range.size - self.held_bytes

    def grow(self, size: int) -> None:
        """Takes memory for the first `size` bytes, at least.

        Raises OutOfMemoryError, and changes nothing, if the GPU has too little.
        """
        start, end = self._head, min(_round_up(size, self._granule), self._limit)
        if end > start:
            self._map(start, end)
            self._head = end
            self._clear(start, end - start)

    def _map(self, start: int, end: int) -> None:
        address = self._range.address + start
        self._memory.map(address, end - start)
        self._parts.append((address, end - start))

    def _clear(self, start: int, length: int) -> None:
        self.bytes[start : start + length].zero_()


_BUFFERS: weakref.WeakSet[GrowingBuffer] = weakref.WeakSet()


def promised_bytes(device: torch.device) -> int:
    """Bytes of a GPU that the buffers of this process may still take."""
    index = device.index or 0
    return sum(one.promised_bytes for one in list(_BUFFERS) if (one.device.index or 0) == index)


def _round_up(size: int, granule: int) -> int:
    return -(-size // granule) * granule


def _release_at_end(memory: Memory, whole: Range, parts: list[tuple[int, int]]) -> None:
    """Frees the memory when nothing refers to `whole` any more. The end of the process frees it
    without us."""
    address, size = whole.address, whole.size
    end = weakref.finalize(whole, lambda: memory.release(Range(address, size), parts))
    end.atexit = False


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_data", c_void_p),
        ("compression", c_ubyte),
        ("direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", c_int))


_OPERANDS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuGetErrorName": (c_int, c_void_p),
}


class DriverMemory:
    """Ranges on one GPU, by the driver's functions."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, operands in _OPERANDS.items():
            getattr(self._library, name).argtypes = operands
        torch.zeros(1, device=self.device)  # creates the device's context
        here = _Location(_ON_DEVICE, self.device.index)
        self._properties = _Properties(type=_PINNED, location=here)
        self._access = _Access(here, _READ_AND_WRITE)
        granule = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granule), byref(self._properties), 0)
        self.granule = granule.value
        self._unused: list[tuple[Range, Iterable[tuple[int, int]]]] = []

    def reserve(self, size: int) -> int:
        self._free_unused()
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def map(self, address: int, size: int) -> None:
        self._free_unused()
        handle = self._create(size)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        self._call("cuMemSetAccess", address, size, byref(self._access), 1)

    def tensor(self, whole: Range) -> Tensor:
        return torch.as_tensor(whole, device=self.device)

    def release(self, whole: Range, parts: Iterable[tuple[int, int]]) -> None:
        """Frees a range. During a capture this is put off, because it waits for the GPU."""
        self._unused.append((whole, parts))
        if not torch.cuda.is_current_stream_capturing():
            self._free_unused()

    def _free_unused(self) -> None:
        if not self._unused:
            return
        torch.cuda.synchronize(self.device)  # until no kernel uses the memory
        while self._unused:
            whole, parts = self._unused.pop()
            for address, size in parts:
                self._call("cuMemUnmap", address, size)
            self._call("cuMemAddressFree", whole.address, whole.size)

    def _create(self, size: int) -> int:
        handle = c_uint64()
        operands = (byref(handle), size, byref(self._properties), 0)
        code = self._library.cuMemCreate(*operands)
        if code == _OUT_OF_MEMORY:
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()  # memory that torch keeps for later
            code = self._library.cuMemCreate(*operands)
        self._check("cuMemCreate", code, size)
        return handle.value

    def _call(self, name: str, *operands: Any) -> None:
        self._check(name, getattr(self._library, name)(*operands))

    def _check(self, name: str, code: int, size: int = 0) -> None:
        if code == _OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self.device)
            raise OutOfMemoryError(
                "the cache cannot grow on the GPU",
                expected=f"{size / _MIB:.0f} MiB",
                got=f"{free / _MIB:.0f} MiB free of {total / _MIB:.0f}",
                next_step="Another program has taken memory. Take a smaller --ctx-size.",
            )
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            reason = (text.value or b"").decode() or f"error {code}"
            raise DeviceError("memory of the cache failed on the GPU", got=f"{name}: {reason}")


@cache
def driver_memory(device: torch.device) -> DriverMemory | None:
    """Ranges on this GPU; None if its driver has no virtual memory interface."""
    library = ctypes.CDLL("libcuda.so.1")
    value, handle = c_int(), c_int()
    torch.zeros(1, device=device)  # starts the driver
    library.cuDeviceGet(byref(handle), device.index or 0)
    library.cuDeviceGetAttribute(byref(value), _HAS_VIRTUAL_MEMORY, handle)
    return DriverMemory(device) if value.value else None
