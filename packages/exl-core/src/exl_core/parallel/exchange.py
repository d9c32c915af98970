"""Exchange of tensors between the ranks of one model.

Sums are formed in the order of the ranks, on every rank: all ranks get the same bits, and the bits
of a row do not depend on the other rows. A reduction that divides the rows among the ranks would
give neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from exl_core.errors import RankError
from exl_core.parallel.plan import Rank

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


class GlooExchange:
    """Exchange over sockets of the loopback interface, with torch's gloo backend.

    The process group is an object of its own: the process's default group is left to others.
    """

    def __init__(self, folder: Path, rank: Rank) -> None:
        """Meets the other ranks in `folder`, which all of them name. Blocks until all are there."""
        self.rank = rank
        store = FileStore(str(folder / "store"), rank.count)
        # torch's own tests name the interface this way; its type stubs do not know it.
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=EXCHANGE_TIMEOUT_S)
        try:
            backend = ProcessGroupGloo(store, rank.index, rank.count, options)
        except RuntimeError as error:
            raise _failed(rank, error) from error
        self._group = dist.ProcessGroup(store, rank.index, rank.count)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._group._register_backend(torch.device("cpu"), kind, backend)
        # The first exchange ends once all pairs of ranks are connected. No rank reads `folder`
        # afterwards.
        self.sum(torch.zeros(1))

    def sum(self, part: Tensor) -> Tensor:
        if not part.numel():
            return part
        parts = [torch.empty_like(part) for _ in range(self.rank.count)]
        self._wait(self._group.allgather([parts], [part.contiguous()]))
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    def gather(self, part: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        if not part.numel():
            return [part.new_empty(len(part), width) for width in widths]
        padded = part.new_zeros(len(part), max(widths))  # the backend gathers equal shapes
        padded[:, : part.shape[1]] = part
        is_first = self.rank.index == 0
        parts = [torch.empty_like(padded) for _ in widths] if is_first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([parts] if is_first else [], [padded], options))
        if not is_first:
            return [part]
        return [found[:, :width] for found, width in zip(parts, widths, strict=True)]

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise _failed(self.rank, error) from error


def _failed(rank: Rank, error: RuntimeError) -> RankError:
    return RankError(f"rank {rank.index}: the exchange with the other ranks failed", got=error)
