"""Exchange between GPUs with NCCL, called directly: on torch's current stream, so that a CUDA graph
captures it, and without a thread of its own (`nccl_library.py` connects the GPUs).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread

import torch
from torch import Tensor

from exl_core.errors import RankError
from exl_core.parallel.background import in_background
from exl_core.parallel.exchange import in_order_of_ranks
from exl_core.parallel.nccl_library import SUM, Communicator, check, load
from exl_core.parallel.plan import Rank

_TYPES = {torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_LOCK_S = 1.0


class Connecting:
    """A rank's GPU connects with those of the others on a thread, while weights are read."""

    def __init__(
        self,
        identity: Callable[[], bytes],
        rank: Rank,
        device: torch.device,
        *,
        in_order: bool = False,
        made: Future[Communicator] | None = None,
    ) -> None:
        """`identity` waits for the `new_id` of rank 0. `in_order`: see `NcclExchange`. `made`: a
        communicator that connects already."""

        def connect() -> NcclExchange:
            if made is not None:
                return NcclExchange(made.result(), device, in_order=in_order)
            comm = Communicator(load(), identity(), rank, device.index)
            return NcclExchange(comm, device, in_order=in_order)

        self.exchange: Future[NcclExchange] = in_background(connect)

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

    def __init__(self, comm: Communicator, device: torch.device, *, in_order: bool = False) -> None:
        """`comm` connects `device`. The exchange owns it from then on."""
        self.rank = comm.rank
        self._adds_parts = in_order and comm.rank.count > 2  # a sum of two has one order
        self._device = device
        self._library = comm.library
        self._lock = Lock()
        self._freeing: Thread | None = None
        self._comm: ctypes.c_void_p | None = comm.handle
        self.before_sum: Callable[[], None] = _do_nothing
        """Called before each sum is queued, for work that the GPU can do beside it."""

    def sum(self, part: Tensor) -> Tensor:
        """May overwrite `part`."""
        part = part.contiguous()
        data, count, kind = _operands(part)
        if not count:
            return part
        self.before_sum()
        if self._adds_parts:
            parts = part.new_empty(self.rank.count, *part.shape)
            self._call("ncclAllGather", data, parts.data_ptr(), count, kind)
            return in_order_of_ranks(parts)
        self._call("ncclAllReduce", data, data, count, kind, SUM)
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

    def _call(self, name: str, *operands: object) -> None:
        """Queues an op on torch's current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device), self._lock:
            if self._comm is None:
                raise RankError("the other ranks of this model have ended")
            self._checked(name, *operands, self._comm, stream)

    def _checked(self, name: str, *operands: object) -> None:
        check(self._library, getattr(self._library, name)(*operands), name, self.rank.index)


def _do_nothing() -> None:
    pass


def _operands(x: Tensor) -> tuple[int, int, int]:
    """Address, number of values and type of a contiguous tensor."""
    return x.data_ptr(), x.numel(), _TYPES[x.dtype]
