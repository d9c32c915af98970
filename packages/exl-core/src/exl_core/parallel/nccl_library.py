"""NCCL without torch: the library, and communicators, which a process may connect while it imports
torch.

The ranks of one machine connect over the loopback interface. NVLink multicast stays off.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from exl_core.errors import DeviceError, RankError
from exl_core.ops.backends.cuda.driver import start_driver
from exl_core.parallel.plan import Rank
from exl_core.settings import set_for_libraries, switch_off_multicast

LIBRARY = "libnccl.so.2"
DRIVER = "libcuda.so.1"
ID_BYTES = 128
"""Size of `ncclUniqueId`."""
SUM = 0
FLOAT32 = 7
_WARM_UP_VALUES = (4, 1 << 14, 1 << 22)  # NCCL takes other protocols for larger tensors
_NON_BLOCKING = 1
_LOG = logging.getLogger("exl.load")


class _UniqueId(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = (("data", ctypes.c_ubyte * ID_BYTES),)


_pointer, _int, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_pointer), _int, _UniqueId, _int),
    "ncclCommAbort": (_pointer,),
    # send, receive, count, type, operation, communicator, stream
    "ncclAllReduce": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
    # send, receive, count, type, communicator, stream
    "ncclAllGather": (_pointer, _pointer, _size, _int, _pointer, _pointer),
    # send, receive, count, type, root, communicator, stream
    "ncclBroadcast": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
    # buffer, count, type, peer, communicator, stream
    "ncclSend": (_pointer, _size, _int, _int, _pointer, _pointer),
    "ncclRecv": (_pointer, _size, _int, _int, _pointer, _pointer),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


def load(*, is_first: bool = False) -> ctypes.CDLL:
    """The library that torch has loaded, or that is installed beside it. With `is_first` torch has
    loaded none yet, and only the installed one is the one that it will load. DeviceError if there
    is none."""
    switch_off_multicast()
    set_for_libraries(NCCL_SOCKET_IFNAME="lo")
    library = None
    for name in (*(() if is_first else (LIBRARY,)), *_installed()):
        try:
            library = ctypes.CDLL(str(name))
            break
        except OSError:
            continue
    if library is None:
        raise DeviceError(
            "tensor parallelism on GPUs needs NCCL",
            expected=LIBRARY,
            got="no such library",
            next_step="Install torch with CUDA, which brings it.",
        )
    for name, types in _FUNCTIONS.items():
        getattr(library, name).argtypes = types
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def new_id(library: ctypes.CDLL | None = None) -> bytes:
    """Id of a communicator, with which its ranks find each other: rank 0 listens for them from then
    on. RankError if the library fails, DeviceError if there is none."""
    library = library or load()
    identity = _UniqueId()
    check(library, library.ncclGetUniqueId(ctypes.byref(identity)), "ncclGetUniqueId", 0)
    return bytes(identity.data)


class Communicator:
    """A GPU that is connected with those of the other ranks. `handle` is NCCL's."""

    def __init__(self, library: ctypes.CDLL, identity: bytes, rank: Rank, device: int) -> None:
        """Connects GPU number `device` with those of the other ranks, which know the same `new_id`.
        Blocks until all have, for ever if one has ended."""
        self.library = library
        self.rank = rank
        self.handle = ctypes.c_void_p()
        start_driver(device)  # also chooses the GPU for this thread
        given = _UniqueId.from_buffer_copy(identity)
        self._checked("ncclCommInitRank", ctypes.byref(self.handle), rank.count, given, rank.index)
        _LOG.debug("GPUs are connected")
        self._warm_up()
        _LOG.debug("first exchanges are complete")

    def _warm_up(self) -> None:
        """Connections are made by the first op of each kind, which a capture does not allow."""
        count = self.rank.count
        with _memory(4 * _WARM_UP_VALUES[-1]) as (data, stream):
            self._checked("ncclBroadcast", data, data, 1, FLOAT32, 0, self.handle, stream)
            for values in _WARM_UP_VALUES:
                operands = data, data, values, FLOAT32, SUM
                self._checked("ncclAllReduce", *operands, self.handle, stream)
            if self.rank.index:
                self._checked("ncclSend", data, 1, FLOAT32, 0, self.handle, stream)
                return
            self._checked("ncclGroupStart")
            for peer in range(1, count):
                self._checked("ncclRecv", data + 4 * peer, 1, FLOAT32, peer, self.handle, stream)
            self._checked("ncclGroupEnd")

    def _checked(self, name: str, *operands: object) -> None:
        check(self.library, getattr(self.library, name)(*operands), name, self.rank.index)


def free_when_made(made: Future[Communicator]) -> None:
    """Frees a communicator, now or once it is connected."""

    def free(done: Future[Communicator]) -> None:
        if done.exception() is None:
            comm = done.result()
            comm.library.ncclCommAbort(comm.handle)

    made.add_done_callback(free)


@contextmanager
def _memory(size_bytes: int) -> Iterator[tuple[int, ctypes.c_void_p]]:
    """Memory of this thread's GPU and a stream, which is waited for at the end."""
    driver = ctypes.CDLL(DRIVER)
    memory, stream = ctypes.c_uint64(), ctypes.c_void_p()

    def call(name: str, *operands: object) -> None:
        if getattr(driver, name)(*operands):
            raise RankError("the first exchange with the other ranks failed", got=name)

    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size_bytes))
    call("cuMemsetD8_v2", memory, ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes))
    call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    yield memory.value, stream
    call("cuStreamSynchronize", stream)
    call("cuStreamDestroy_v2", stream)
    call("cuMemFree_v2", memory)


def check(library: ctypes.CDLL, error: int, name: str, rank: int) -> None:
    """RankError for an error of the library."""
    if error:
        text = library.ncclGetErrorString(error).decode()
        raise RankError(
            f"rank {rank}: the exchange with the other ranks failed", got=f"{name}: {text}"
        )


def _installed() -> list[Path]:
    try:
        found = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = () if found is None else found.submodule_search_locations or ()
    return [Path(folder) / "lib" / LIBRARY for folder in folders]
