"""Exchange of tensors between the ranks of one model.

Sums are formed in the order of the ranks, on every rank: all ranks get the same bits, and the bits
of a row do not depend on the other rows. A reduction that divides the rows among the ranks would
give neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store

from exl_core.errors import RankError
from exl_core.parallel.plan import Rank

LOOPBACK = "127.0.0.1"
EXCHANGE_TIMEOUT_S = 60
"""Longest wait for the other ranks in one exchange. A rank that does not answer at all is noticed
earlier, by its missing heartbeat."""
_LOOK = timedelta(seconds=0.5)
"""Time between two looks at whether another rank has ended, while a transfer waits."""


class Exchange(Protocol):
    """Exchange of a forward pass. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> Rank: ...

    def sum(self, part: Tensor) -> Tensor:
        """Sum of all ranks' parts, float32 of any shape, in rank order."""
        ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        """On rank 0 all ranks' parts [n, widths[r]], float32; on the others the own part alone."""
        ...

    def spread_(self, values: Tensor) -> Tensor:
        """Overwrites `values`, int64 of any shape, by those of rank 0."""
        ...


class NoExchange:
    """Exchange of a rank that has whole matrices."""

    rank = Rank(0, 1)

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:  # noqa: ARG002
        return [part]

    def spread_(self, values: Tensor) -> Tensor:
        return values


def never() -> bool:
    return False


class GlooGroup:
    """A process group of torch's gloo backend, whose transfers end when the ranks do.

    It is an object of its own: the process's default group is left to others.
    """

    def __init__(
        self,
        store: Store,
        rank: Rank,
        address: str,
        has_ended: Callable[[], bool] = never,
    ) -> None:
        """Listens at `address`, an IP address of this machine. RankError if the ranks do not meet
        in `store`. `has_ended`: whether another rank has ended, as this process knows by other
        means."""
        # torch's own tests name the interface this way; its type stubs do not know it.
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=EXCHANGE_TIMEOUT_S)
        options._threads = 1  # it drops its reference to a transfer before the next one
        self._rank = rank.index
        self._has_ended = has_ended
        try:
            backend = ProcessGroupGloo(store, rank.index, rank.count, options)
        except RuntimeError as error:
            raise self._failed(error) from error
        self.ranks = dist.ProcessGroup(store, rank.index, rank.count)
        self.ranks._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend
        )
        # The last transfer, with its tensors. A thread that frees tensors takes Python's lock. If
        # the thread of gloo did so, it would abort a process whose interpreter is ending, and it
        # would wait forever for a thread that waits for it. `ranks` is freed before `_last`, and
        # ends that thread.
        self._last: dist.Work | None = None

    def wait_for_all(self, work: dist.Work | None) -> None:
        """Waits for a transfer among all ranks. RankError if it fails, or goes on after another
        rank has ended."""
        assert work is not None, "the operation is asynchronous"
        had_ended = False
        while not _is_done(work):
            if had_ended:
                # Gloo has missed the end of a connection on which it sends (1 of 100 killed ranks
                # on a busy machine), and waits for `EXCHANGE_TIMEOUT_S`. So would its destructor,
                # so that these objects are never freed.
                for one in (self.ranks, work):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
                raise self._failed("another rank has ended")
            had_ended = self._has_ended()  # its connections may close a moment later
        self._last = work
        self.wait_for(work)

    def wait_for(self, work: dist.Work | None) -> None:
        """Waits for a transfer between two ranks. RankError if it fails."""
        assert work is not None, "the operation is asynchronous"
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, got: object) -> RankError:
        return RankError(f"rank {self._rank}: the exchange with the other ranks failed", got=got)


def _is_done(work: dist.Work) -> bool:
    """Whether a transfer among all ranks has succeeded or failed, for which this waits a moment.
    Gloo ends one between two ranks if the time of a `wait` passes, and this one not."""
    with suppress(RuntimeError):  # of the transfer, or because the time has passed
        work.wait(_LOOK)
    return work.is_completed()


class GlooExchange:
    """Exchange over sockets, with torch's gloo backend."""

    def __init__(self, store: Store, rank: Rank, has_ended: Callable[[], bool] = never) -> None:
        """Meets the other ranks in `store`, over the loopback interface. Blocks until all are
        there. `has_ended` as for `GlooGroup`."""
        self.rank = rank
        self._connected: GlooGroup | None = GlooGroup(store, rank, LOOPBACK, has_ended)
        # The first exchange ends once all pairs of ranks are connected. No rank reads `store`
        # afterwards.
        self.sum(torch.zeros(1))

    @classmethod
    def in_folder(cls, folder: Path, rank: Rank, has_ended: Callable[[], bool] = never) -> Self:
        """Exchange of ranks that all name the same folder."""
        store = FileStore(str(folder / "store"), rank.count)
        store.set_timeout(timedelta(seconds=EXCHANGE_TIMEOUT_S))  # also for a folder that is gone
        return cls(store, rank, has_ended)

    @property
    def _group(self) -> GlooGroup:
        if self._connected is None:
            raise RankError("the exchange with the other ranks is closed")
        return self._connected

    def close(self) -> None:
        """Frees the sockets and the port. Later exchanges raise RankError."""
        self._connected = None

    def sum(self, part: Tensor) -> Tensor:
        if not part.numel():
            return part
        parts = [torch.empty_like(part) for _ in range(self.rank.count)]
        group = self._group
        group.wait_for_all(group.ranks.allgather([parts], [part.contiguous()]))
        return in_order_of_ranks(parts)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        if not part.numel():
            return [part.new_empty(len(part), width) for width in widths]
        padded = part.new_zeros(len(part), max(widths))  # the backend gathers equal shapes
        padded[:, : part.shape[1]] = part
        is_first = self.rank.index == 0
        parts = [torch.empty_like(padded) for _ in widths] if is_first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        group = self._group
        group.wait_for_all(group.ranks.gather([parts] if is_first else [], [padded], options))
        if not is_first:
            return [part]
        return [found[:, :width] for found, width in zip(parts, widths, strict=True)]

    def spread_(self, values: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        group = self._group
        group.wait_for_all(group.ranks.broadcast([values], options))
        return values


def in_order_of_ranks(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum of the parts of all ranks, by rank, in the order of the ranks. Overwrites the first
    part."""
    total = parts[0]
    for other in parts[1:]:
        total += other
    return total
