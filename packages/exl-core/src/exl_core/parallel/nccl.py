"""Exchange between GPUs with NCCL, called directly: on torch's current stream, so that a CUDA graph
captures it, and without a thread of its own.

The ranks of one machine connect over the loopback interface. NVLink multicast stays off.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread

import torch
from torch import Tensor

from exl_core.errors import DeviceError, RankError
from exl_core.parallel.exchange import in_background
from exl_core.parallel.plan import Rank
from exl_core.settings import set_for_libraries

LIBRARY = "libnccl.so.2"
ID_BYTES = 128
"""Size of `ncclUniqueId`."""
_SUM = 0
_TYPES = {torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_LOCK_S = 1.0
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


def new_id() -> bytes:
    """Id of a communicator, with which its ranks find each other: rank 0 listens for them from then
    on. RankError if the library fails, DeviceError if there is none."""
    library = _load()
    identity = _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(identity)), "ncclGetUniqueId", 0)
    return bytes(identity.data)


class Connecting:
    """A rank's GPU connects with those of the others on a thread, while weights are read."""

    def __init__(
        self,
        identity: Callable[[], bytes],
        rank: Rank,
        device: torch.device,
        *,
        in_order: bool = False,
    ) -> None:
        """`identity` waits for the `new_id` of rank 0. `in_order`: see `NcclExchange`."""
        self.exchange: Future[NcclExchange] = in_background(
            lambda: NcclExchange(identity(), rank, device, in_order=in_order)
        )

    def abort(self, wait_s: float = 0.0) -> None:
        """Ends the exchange, now or once it is connected (`NcclExchange.abort`)."""

        def end(made: Future[NcclExchange]) -> None:
            if made.exception() is None:
                made.result().abort(wait_s)

        self.exchange.add_done_callback(end)


class NcclExchange:
    """Exchange between the GPUs of one machine, one for each rank.

    Results are equal on all ranks, to the bit. Ops are queued on the current stream, and a rank
    that fails leaves the others' streams waiting until `abort`.

    NCCL forms sums of more than two ranks in an order that depends on the size of the tensor. With
    `in_order` every rank gets all parts and adds them in the order of the ranks, so that the bits
    of a row do not depend on the other rows. It receives count - 1 parts instead of about two.
    """

    def __init__(
        self, identity: bytes, rank: Rank, device: torch.device, *, in_order: bool = False
    ) -> None:
        """Connects `device` with the GPUs of the other ranks, which know the same `new_id`. Blocks
        until all have, for ever if one has ended."""
        self.rank = rank
        self._adds_parts = in_order and rank.count > 2  # a sum of two has one order
        self._device = device
        self._library = _load()
        self._lock = Lock()
        self._freeing: Thread | None = None
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        given = _UniqueId.from_buffer_copy(identity)
        with torch.cuda.device(device):
            self._checked(
                "ncclCommInitRank",
                *(ctypes.byref(self._comm), self.rank.count, given, self.rank.index),
            )
            _LOG.debug("GPUs are connected")
            with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                self._warm_up()
        _LOG.debug("first exchanges are complete")

    def sum(self, part: Tensor) -> Tensor:
        """May overwrite `part`."""
        part = part.contiguous()
        data, count, kind = _operands(part)
        if not count:
            return part
        if self._adds_parts:
            parts = part.new_empty(self.rank.count, *part.shape)
            self._call("ncclAllGather", data, parts.data_ptr(), count, kind)
            return in_order_of_ranks(parts)
        self._call("ncclAllReduce", data, data, count, kind, _SUM)
        return part

    def gather(self, part: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        part = part.contiguous()
        if self.rank.index != 0:
            if part.numel():
                self._call("ncclSend", *_operands(part), 0)
            return [part]
        others = [part.new_empty(len(part), width) for width in widths[1:]]
        if part.numel():
            self._checked("ncclGroupStart")
            for peer, other in enumerate(others, 1):
                self._call("ncclRecv", *_operands(other), peer)
            self._checked("ncclGroupEnd")
        return [part, *others]

    def spread_(self, values: Tensor) -> Tensor:
        data, count, kind = _operands(values)
        if count:
            self._call("ncclBroadcast", data, data, count, kind, 0)
        return values

    def abort(self, wait_s: float = 0.0) -> None:
        """Frees the communicator, which needs no other rank. Ops on this GPU that wait for one end;
        their results are void, and later calls raise RankError.

        Waits up to `wait_s` seconds for it: captured graphs hold the communicator until they go.
        May be called on any thread, and again.
        """
        has_lock = self._lock.acquire(timeout=_LOCK_S)  # a full queue holds up a caller
        comm, self._comm = self._comm, None
        if has_lock:
            self._lock.release()
        if comm is not None:
            free = self._library.ncclCommAbort
            freeing = Thread(target=free, args=(comm,), name="exl-nccl", daemon=True)
            with suppress(RuntimeError):  # at the end of the program, which starts no threads
                freeing.start()
                self._freeing = freeing
        if self._freeing is not None and wait_s:
            self._freeing.join(wait_s)

    def _warm_up(self) -> None:
        """Connections are made by the first op of each kind, which a capture does not allow."""
        values = torch.ones(1, 1, device=self._device)
        self.spread_(values)
        for rows in (1, 1 << 12, 1 << 20):  # NCCL takes other protocols for larger tensors
            self.sum(torch.ones(rows, 4, device=self._device))
        self.gather(values, [1] * self.rank.count)
        torch.cuda.current_stream(self._device).synchronize()

    def _call(self, name: str, *operands: object) -> None:
        """Queues an op on torch's current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device), self._lock:
            if self._comm is None:
                raise RankError("the other ranks of this model have ended")
            self._checked(name, *operands, self._comm, stream)

    def _checked(self, name: str, *operands: object) -> None:
        _check(self._library, getattr(self._library, name)(*operands), name, self.rank.index)


def in_order_of_ranks(parts: Tensor) -> Tensor:
    """Sum of the parts of all ranks [ranks, ...] in the order of the ranks. Overwrites the first
    part."""
    total = parts[0]
    for other in parts[1:]:
        total += other
    return total


def _operands(x: Tensor) -> tuple[int, int, int]:
    """Address, number of values and type of a contiguous tensor."""
    return x.data_ptr(), x.numel(), _TYPES[x.dtype]


def _check(library: ctypes.CDLL, error: int, name: str, rank: int) -> None:
    if error:
        text = library.ncclGetErrorString(error).decode()
        raise RankError(
            f"rank {rank}: the exchange with the other ranks failed", got=f"{name}: {text}"
        )


def _load() -> ctypes.CDLL:
    """The library that torch has loaded, or that is installed beside it."""
    set_for_libraries(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo")
    library = None
    for name in (LIBRARY, *_installed()):
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


def _installed() -> list[Path]:
    try:
        found = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = () if found is None else found.submodule_search_locations or ()
    return [Path(folder) / "lib" / LIBRARY for folder in folders]
