"""Exchange between the GPUs of one host through memory that all of them can access.

Sums of the layers of small passes, and large sums, go through the ranks' buffers
(`ops/backends/cuda/peers.py`), and everything else through another exchange of the same ranks,
which also connects the buffers. Whether memory can be shared, and arrives as it was written, is
tried at load, because drivers report access on some machines where zeros arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.errors import RankError
from exl_core.model.cuda_graphs import LONG_BUCKETS
from exl_core.ops.table import OpTable
from exl_core.parallel.exchange import Exchange, in_order_of_ranks
from exl_core.parallel.plan import ExchangeKind, Rank

if TYPE_CHECKING:
    from exl_core.ops.backends.cuda.peers import PeerBuffers, PeerSums

_LOG = logging.getLogger("exl.load")
MAX_RANKS = 8
MAX_ROWS = 64
"""Most rows of a pass whose products send their sums to all ranks. With more, the ranks divide the
sums, which moves fewer bytes."""
MAX_SUM_VALUES = 1 << 24
"""Most values of a large sum: 2048 rows of 8192, for which a buffer has twice 32 MiB."""
TRIAL_TIMEOUT_MS = 2000
TRIALS = 4
"""Sums at load: more than there are stages."""
_MOST_BYTES = 200
"""Longest text that a rank tells the others."""


class Link(NamedTuple):
    """How the ranks exchange sums, a clause for the user."""

    is_shared: bool
    reason: str

    def __str__(self) -> str:
        how = "their own memory" if self.is_shared else "NCCL"
        return f"the GPUs exchange through {how}, because {self.reason}"


class Memory(Protocol):
    """Memory of this process that others open by `handle`."""

    address: int
    handle: bytes

    def open(self, handle: bytes) -> int: ...
    @property
    def close(self) -> Callable[[], object]: ...


class PeerExchange:
    """Exchange with `peers` for the layers of small passes and for large sums."""

    def __init__(self, inner: Exchange, peers: PeerSums, memory: Memory) -> None:
        self.rank: Rank = inner.rank
        self.peers = peers
        self._inner = inner
        self._memory = memory

    def sum(self, part: Tensor) -> Tensor:
        """May overwrite `part`."""
        found = self.peers.add(part)
        return self._inner.sum(part) if found is None else found

    def gather(self, part: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        return self._inner.gather(part, widths)

    def spread_(self, values: Tensor) -> Tensor:
        return self._inner.spread_(values)

    def abort(self, wait_s: float = 0.0) -> None:
        """Ends all ops on this GPU that wait for another rank, and frees what `NcclExchange.abort`
        frees, for which it waits up to `wait_s` seconds. May be called again."""
        self.peers.abort()
        abort: Callable[[float], None] | None = getattr(self._inner, "abort", None)
        if abort is not None:
            abort(wait_s)

    def close(self) -> None:
        """Frees the memory, once no rank runs a pass any more. May be called again."""
        with suppress(RuntimeError):  # of the driver, after a failure
            self._memory.close()

    @contextmanager
    def passing(self, rows: int) -> Iterator[None]:
        """Context of a pass over `rows` rows. RankError after `abort`."""
        if self.peers.has_ended:
            raise RankError("the other ranks of this model have ended")
        if not 0 < rows <= MAX_ROWS:
            yield
            return
        self.peers.begin(rows)
        try:
            yield
            self.peers.end()
        finally:
            self.peers.cancel()


def with_peers(
    exchange: Exchange, ops: OpTable, config: ModelConfig, kind: ExchangeKind
) -> tuple[Exchange, Link | None]:
    """The exchange with shared memory in addition, where this is possible. All ranks call it.

    `exchange` connects the ranks' GPUs. The link is None without GPUs.
    """
    if ops.device.type != "cuda" or exchange.rank.count == 1:
        return exchange, None
    from exl_core.ops.backends.cuda.peers import SharedMemory
    from exl_core.ops.backends.cuda.table import CudaTable
    from exl_core.parallel.nccl import NcclExchange

    assert isinstance(ops, CudaTable), "the table of a GPU"
    if isinstance(exchange, NcclExchange):
        exchange.before_sum = ops.begin_exchange
    if kind == "nccl":
        return exchange, Link(False, "--exchange nccl asks for it")
    table, device, rank, width = ops, ops.device, exchange.rank, config.hidden_size

    def trial(addresses: Sequence[int], has_large: bool) -> tuple[PeerSums, str | None]:
        placed = buffers_of(config, addresses, has_large=has_large)
        peers = table.peer_sums(rank.index, placed)
        peers.is_alone = True
        return peers, tried(peers, exchange, width, device)

    def make(has_large: bool) -> SharedMemory:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()  # the driver allocates the buffer, not torch
        placed = buffers_of(config, [0] * rank.count, has_large=has_large)
        return SharedMemory(device, placed.size_bytes)

    return connected(exchange, make, trial, width, device)


def buffers_of(
    config: ModelConfig, addresses: Sequence[int], *, has_large: bool = True
) -> PeerBuffers:
    """Places in the ranks' buffers, which begin at `addresses`, for the sums of a model.
    `has_large`: there are places for large sums."""
    from exl_core.ops.backends.cuda.peers import PeerBuffers

    width = config.hidden_size
    large = min(MAX_SUM_VALUES, LONG_BUCKETS[-1] * width) if has_large else 0
    return PeerBuffers(tuple(addresses), MAX_ROWS, width, config.vocab_size, large)


def connected(
    exchange: Exchange,
    make_memory: Callable[[bool], Memory],
    trial: Callable[[Sequence[int], bool], tuple[PeerSums, str | None]],
    width: int,
    device: torch.device,
) -> tuple[Exchange, Link]:
    """The exchange with shared memory in addition, if all ranks can connect to it.

    `make_memory` allocates this rank's buffer, with places for large sums if its argument is true.
    Only if all ranks have these do large sums go through the memory. `trial` gets the addresses of
    all buffers, and whether they have places for large sums. It returns the sums, and what is wrong
    with them. A rank whose driver refuses says so to all others: either all ranks use the memory or
    none does.
    """
    table = Agreement(exchange, device)
    fault = _fault_of(exchange.rank.count, width)
    memory: Memory | None = None
    large_fault: str | None = None
    if fault is None:
        memory, large_fault, fault = _allocated(make_memory)
    own = b"" if memory is None else bytes([large_fault is None]) + memory.handle
    handles = table.all_bytes(own)
    buffers: list[int] = []
    if fault is None and memory is not None and all(handles):
        try:
            for index, handle in enumerate(handles):
                is_own = index == exchange.rank.index
                buffers.append(memory.address if is_own else memory.open(handle[1:]))
        except RuntimeError as error:
            fault = f"the memory of rank {len(buffers)} cannot be opened ({error})"
    reason = table.first_fault(fault)
    if reason is None:
        without = [index for index, handle in enumerate(handles) if not handle[0]]
        if without:
            first = without[0] if large_fault is None else exchange.rank.index
            cause = "" if large_fault is None else f" ({large_fault})"
            _LOG.debug("large sums go through NCCL: rank %d has no memory for them%s", first, cause)
        peers, fault = trial(buffers, not without)
        reason = table.first_fault(fault)
        if reason is None and memory is not None:
            link = Link(True, "every rank can read what the others write there")
            return PeerExchange(exchange, peers, memory), link
    if memory is not None:
        with suppress(RuntimeError):
            memory.close()
    return exchange, Link(False, reason or "a rank has no memory")


def _allocated(
    make_memory: Callable[[bool], Memory],
) -> tuple[Memory | None, str | None, str | None]:
    """This rank's buffer, why it has no places for large sums, and why there is none. Large sums
    need most of the memory: without them a buffer may still fit on a full GPU."""
    try:
        return make_memory(True), None, None
    except RuntimeError as error:  # of the driver
        fault = str(error)
    try:
        return make_memory(False), fault, None
    except RuntimeError as error:
        return None, None, f"memory cannot be shared ({error})"


def _fault_of(ranks: int, width: int) -> str | None:
    if ranks > MAX_RANKS:
        return f"{ranks} ranks are more than {MAX_RANKS}"
    if width % 4:
        return f"states of {width} values are no multiple of 4"
    return None


def tried(peers: PeerSums, exchange: Exchange, width: int, device: torch.device) -> str | None:
    """Exchanges random sums the way that passes do. What is wrong with them; None if they are
    right. Large sums get integers, which they do not round."""
    from exl_core.ops.backends.cuda.peers import LargeSums

    count, own = exchange.rank.count, exchange.rank.index
    generator = torch.Generator().manual_seed(count)
    peers.timeout_ms = TRIAL_TIMEOUT_MS
    peers.begin(MAX_ROWS)
    exchange.sum(torch.zeros(1, device=device))
    is_right = True
    for _ in range(TRIALS):
        parts = torch.randn(count, MAX_ROWS, width, generator=generator)
        peers.send(parts[own].to(device))
        found = peers.await_sum(None, defers=False).cpu()
        is_right &= torch.equal(found, in_order_of_ranks(parts))
    peers.cancel()
    parts = torch.randint(-512, 513, (count, LargeSums.MIN_VALUES), generator=generator).float()
    large = peers.add(parts[own].to(device))
    is_right &= large is None or torch.equal(large.cpu(), in_order_of_ranks(parts))
    peers.timeout_ms = 0
    if peers.has_ended:
        return f"nothing has arrived for {TRIAL_TIMEOUT_MS / 1000:g} s"
    return None if is_right else "sums have arrived with other values than were sent"


class Agreement:
    """Bytes that every rank tells all others while they connect, as float32 sums on a device."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        self._exchange = exchange
        self._device = device

    def all_bytes(self, own: bytes) -> list[bytes]:
        """The bytes of all ranks, at most `_MOST_BYTES` of each."""
        rank = self._exchange.rank
        rows = torch.zeros(rank.count, 1 + _MOST_BYTES)
        held = list(own[:_MOST_BYTES])
        rows[rank.index, : 1 + len(held)] = torch.tensor([len(held), *held]).float()
        found = self._exchange.sum(rows.to(self._device)).cpu().int().tolist()
        return [bytes(values[:length]) for length, *values in found]

    def first_fault(self, own: str | None) -> str | None:
        """The fault of the first rank that has one, with its number."""
        faults = self.all_bytes((own or "").encode())
        texts = (
            f"on rank {index} {fault.decode('utf-8', 'replace')}"
            for index, fault in enumerate(faults)
            if fault
        )
        return next(texts, None)
