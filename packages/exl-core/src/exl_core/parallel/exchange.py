"""Exchange of tensors between the ranks of one model.

Sums are formed in the order of the ranks, on every rank: all ranks get the same bits, and the bits
of a row do not depend on the other rows. A reduction that divides the rows among the ranks would
give neither.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def gloo_group(store: Store, rank: Rank, address: str) -> dist.ProcessGroup:
    """A process group that listens at `address`, an IP address of this machine. RankError if the
    ranks do not meet in `store`.

    The group is an object of its own: the process's default group is left to others.
    """
    # torch's own tests name the interface this way; its type stubs do not know it.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=EXCHANGE_TIMEOUT_S)
    try:
        backend = ProcessGroupGloo(store, rank.index, rank.count, options)
    except RuntimeError as error:
        raise failed_exchange(rank.index, error) from error
    group = dist.ProcessGroup(store, rank.index, rank.count)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


_FAILED: list[dist.Work] = []
"""Failed transfers. Otherwise a thread of gloo may have the last reference to one and free its
tensors, for which it needs the interpreter: it aborts a process whose interpreter is ending, and
waits forever for one that waits for the thread. A group fails once, so that there are few."""


def wait_for(work: dist.Work | None, rank: int) -> None:
    """Waits for a transfer. RankError if it fails."""
    assert work is not None, "the operation is asynchronous"
    try:
        work.wait()
    except RuntimeError as error:
        _FAILED.append(work)
        raise failed_exchange(rank, error) from error


class GlooExchange:
    """Exchange over sockets, with torch's gloo backend."""

    def __init__(self, store: Store, rank: Rank, address: str = LOOPBACK) -> None:
        """Meets the other ranks in `store`. Blocks until all are there."""
        self.rank = rank
        self._connected: dist.ProcessGroup | None = gloo_group(store, rank, address)
        # The first exchange ends once all pairs of ranks are connected. No rank reads `store`
        # afterwards.
        self.sum(torch.zeros(1))

    @classmethod
    def in_folder(cls, folder: Path, rank: Rank) -> Self:
        """Exchange over the loopback interface, of ranks that all name the same folder."""
        store = FileStore(str(folder / "store"), rank.count)
        store.set_timeout(timedelta(seconds=EXCHANGE_TIMEOUT_S))  # also for a folder that is gone
        return cls(store, rank)

    @property
    def _group(self) -> dist.ProcessGroup:
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
        wait_for(self._group.allgather([parts], [part.contiguous()]), self.rank.index)
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
        work = self._group.gather([parts] if is_first else [], [padded], options)
        wait_for(work, self.rank.index)
        if not is_first:
            return [part]
        return [found[:, :width] for found, width in zip(parts, widths, strict=True)]

    def spread_(self, values: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        wait_for(self._group.broadcast([values], options), self.rank.index)
        return values


def failed_exchange(rank: int, error: RuntimeError) -> RankError:
    return RankError(f"rank {rank}: the exchange with the other ranks failed", got=error)


def in_order_of_ranks(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum of the parts of all ranks, by rank, in the order of the ranks. Overwrites the first
    part."""
    total = parts[0]
    for other in parts[1:]:
        total += other
    return total
