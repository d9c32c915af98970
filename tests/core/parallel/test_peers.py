"""Connection of the ranks' memory, with memory and sums that need no GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from exl_core.errors import RankError, RequestError
from exl_core.ops.backends.cuda import peers as cuda_peers
from exl_core.ops.backends.cuda.peers import LargeSums, PeerBuffers, PeerSums
from exl_core.ops.backends.cuda.trellis import CudaTrellisInputs
from exl_core.ops.open import get_table
from exl_core.parallel.exchange import Exchange, NoExchange
from exl_core.parallel.followers import END_S, Group
from exl_core.parallel.model import PartialLinear, PeerOps, SummingOps
from exl_core.parallel.peers import (
    MAX_RANKS,
    MAX_ROWS,
    TRIALS,
    Agreement,
    Link,
    PeerExchange,
    buffers_of,
    connected,
    tried,
    with_peers,
)
from exl_core.parallel.plan import Rank, parse_exchange
from exl_core.session import ranks
from exl_core.session.hosts import load_part
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_model
from exl_core.session.weights import Loading
from exl_kernels import cuda
from exl_kernels.cuda_exchange import MAX_PEERS, REDUCE_BLOCKS
from support.thread_ranks import ThreadExchange, on_ranks
from support.thread_sums import ThreadSums
from support.tiny_models import save, tiny_llama

WIDTH = 64
CPU = torch.device("cpu")


class FakeMemory:
    """Memory whose handle names it: address 100 + rank."""

    def __init__(self, rank: int, *, refuses: bool = False, is_small: bool = False) -> None:
        self.address = 100 + rank
        self.handle = b"\0handle " + bytes([rank])
        self.opened: list[bytes] = []
        self.is_closed = False
        self.is_small = is_small
        self._refuses = refuses

    def open(self, handle: bytes) -> int:
        if self._refuses:
            raise RuntimeError("peer access is not supported")
        self.opened.append(handle)
        return 100 + handle[-1]

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeSums:
    """Sums of `exchange`, and changes to them."""

    exchange: Exchange
    has_large: bool = True
    is_wrong: bool = False
    is_wrong_if_large: bool = False
    has_ended: bool = False
    timeout_ms: int = 0
    part: Tensor | None = None
    shape: int | None = None
    was_aborted: bool = False
    num_ended: int = 0

    def add(self, part: Tensor) -> Tensor | None:
        if not self.has_large:
            return None
        total = self.exchange.sum(part)
        return total + 1 if self.is_wrong_if_large else total

    def begin(self, rows: int) -> None:
        self.shape = rows

    def end(self) -> None:
        self.num_ended += 1

    def cancel(self) -> None:
        self.shape = None

    def send(self, part: Tensor) -> None:
        self.part = part

    def await_sum(self, x: Tensor | None, *, defers: bool) -> Tensor:
        assert x is None
        assert not defers
        assert self.part is not None
        total = self.exchange.sum(self.part)
        return total + 1 if self.is_wrong else total

    def abort(self) -> None:
        self.was_aborted = self.has_ended = True


def connect(
    exchange: ThreadExchange, memory: FakeMemory | None, width: int = WIDTH, **changes: Any
) -> tuple[Exchange, Link, Sequence[int]]:
    """One rank's part. None: its driver shares no memory."""
    seen: list[int] = []

    def make(has_large: bool) -> FakeMemory:
        if memory is None:
            raise RuntimeError("exl_cuda_shared_new: not supported")
        if has_large and memory.is_small:
            raise RuntimeError("exl_cuda_shared_new: out of memory")
        return memory

    def trial(buffers: Sequence[int], has_large: bool) -> tuple[Any, str | None]:
        seen.extend(buffers)
        sums: Any = FakeSums(exchange, has_large=has_large, **changes)
        return sums, tried(sums, exchange, width, CPU)

    found, link = connected(exchange, make, trial, width, CPU)
    return found, link, seen


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_opens_the_memory_of_all_others(count: int) -> None:
    def work(exchange: ThreadExchange) -> FakeMemory:
        memory = FakeMemory(exchange.rank.index)
        found, link, buffers = connect(exchange, memory)
        assert isinstance(found, PeerExchange)
        assert link.is_shared
        assert "their own memory" in str(link)
        assert buffers == [100 + rank for rank in range(count)]
        return memory

    for rank, memory in enumerate(on_ranks(count, work)):
        assert len(memory.opened) == count - 1
        assert memory.handle not in memory.opened
        assert not memory.is_closed, rank


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("memory", "on rank 1 memory cannot be shared (exl_cuda_shared_new: not supported)"),
        ("open", "on rank 1 the memory of rank 0 cannot be opened (peer access is not supported)"),
        ("values", "on rank 1 sums have arrived with other values than were sent"),
        ("large values", "on rank 1 sums have arrived with other values than were sent"),
        ("time", "on rank 1 nothing has arrived for 2 s"),
    ],
)
def test_a_fault_of_one_rank_makes_all_of_them_take_nccl(fault: str, expected: str) -> None:
    def work(exchange: ThreadExchange) -> None:
        is_faulty = exchange.rank.index == 1
        memory = FakeMemory(exchange.rank.index, refuses=is_faulty and fault == "open")
        found, link, _ = connect(
            exchange,
            None if is_faulty and fault == "memory" else memory,
            is_wrong=is_faulty and fault == "values",
            is_wrong_if_large=is_faulty and fault == "large values",
            has_ended=is_faulty and fault == "time",
        )
        assert found is exchange
        assert link == Link(False, expected)
        assert str(link) == f"the GPUs exchange through NCCL, because {expected}"
        assert memory.is_closed or (is_faulty and fault == "memory")

    on_ranks(2, work)


@pytest.mark.parametrize("small", [(1,), (0,), (0, 1, 2)])
def test_large_sums_alone_take_nccl_without_memory_for_them(
    small: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The places of a buffer depend on the ranks' agreement about large sums."""
    caplog.set_level(logging.DEBUG, "exl.load")

    def work(exchange: ThreadExchange) -> bool:
        index = exchange.rank.index
        memory = FakeMemory(index, is_small=index in small)
        found, link, buffers = connect(exchange, memory)
        assert isinstance(found, PeerExchange)
        assert link.is_shared
        assert buffers == [100, 101, 102]
        assert not memory.is_closed
        sums: Any = found.peers
        return bool(sums.has_large)

    assert on_ranks(3, work) == [False] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all(line.startswith("large sums go through NCCL: rank ") for line in lines)
    assert sum("exl_cuda_shared_new: out of memory" in line for line in lines) == len(small)


def test_places_without_large_sums_are_the_first_ones_of_a_buffer() -> None:
    config: Any = SimpleNamespace(hidden_size=8192, vocab_size=128256)
    whole, small = (buffers_of(config, [0, 0], has_large=has) for has in (True, False))
    assert whole.large_parts_at(0) == small.size_bytes
    assert whole.size_bytes - small.size_bytes > 2 * 32 << 20
    assert (small.rows, small.width, small.vocab, small.large) == (MAX_ROWS, 8192, 128256, 0)


def test_states_that_are_no_whole_vectors_take_nccl() -> None:
    def work(exchange: ThreadExchange) -> Link:
        return connect(exchange, FakeMemory(exchange.rank.index), width=66)[1]

    first, second = on_ranks(2, work)
    assert first == second == Link(False, "on rank 0 states of 66 values are no multiple of 4")


def test_more_ranks_than_kernels_take_use_nccl() -> None:
    def work(exchange: ThreadExchange) -> Link:
        return connect(exchange, FakeMemory(exchange.rank.index))[1]

    links = on_ranks(MAX_RANKS + 1, work)
    assert set(links) == {Link(False, "on rank 0 9 ranks are more than 8")}


def test_ranks_tell_each_other_bytes() -> None:
    def work(exchange: ThreadExchange) -> list[bytes]:
        own = bytes(range(256))[exchange.rank.index * 100 :]
        return Agreement(exchange, CPU).all_bytes(own)

    every = bytes(range(256))
    assert on_ranks(2, work) == [[every[:200], every[100:]]] * 2


def test_only_small_passes_go_through_shared_memory() -> None:
    def work(exchange: ThreadExchange) -> None:
        sums: Any = FakeSums(exchange)
        memory = FakeMemory(0)
        found = PeerExchange(exchange, sums, memory)
        for rows, shape in ((1, 1), (MAX_ROWS, MAX_ROWS), (MAX_ROWS + 1, None)):
            with found.passing(rows):
                assert sums.shape == shape
            assert sums.shape is None
        assert sums.num_ended == 2
        with pytest.raises(ValueError, match="in a pass"), found.passing(1):
            raise ValueError("in a pass")
        assert sums.num_ended == 2
        assert sums.shape is None
        found.close()
        assert memory.is_closed
        found.abort()
        assert sums.was_aborted
        with pytest.raises(RankError, match="have ended"), found.passing(1):
            pass

    on_ranks(2, work)


class Aborted(NoExchange):
    """An exchange that records the times that `abort` may wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def abort(self, wait_s: float) -> None:
        self.waits.append(wait_s)


@pytest.mark.parametrize("is_failure", [False, True])
def test_the_end_of_the_group_ends_what_waits_in_shared_memory(
    is_failure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that hangs is killed when the model is unloaded. A pass of rank 0 that waits for
    its sums must end, because memory is freed after it."""
    inner = Aborted()
    sums, unused, group = FakeSums(inner), None, Group([], lambda _: inner)
    found: Any = PeerExchange(inner, sums, FakeMemory(0)), Link(True, "it works")  # type: ignore[arg-type]
    monkeypatch.setattr(ranks, "with_peers", lambda *_: found)
    assert ranks.with_shared_memory(inner, group, unused, unused, "auto") == found  # type: ignore[arg-type]
    assert not sums.was_aborted
    if is_failure:
        group.abandon("failed")
    group.close()
    assert sums.was_aborted
    assert inner.waits == ([0.0] if is_failure else []) + [END_S]


def test_ranks_of_the_cpu_have_no_link() -> None:
    def work(exchange: ThreadExchange) -> None:
        table = get_table("cpu", threads=1)
        config: Any = None  # of no concern there
        assert with_peers(exchange, table, config, "auto") == (exchange, None)

    on_ranks(2, work)


def test_a_trial_takes_all_stages() -> None:
    assert TRIALS > 3


def test_the_kind_of_exchange_is_checked_before_anything_is_read() -> None:
    assert [parse_exchange(one) for one in ("auto", "nccl")] == ["auto", "nccl"]
    with pytest.raises(RequestError, match=r"no such exchange .*expected auto or nccl, got mpi"):
        parse_exchange("mpi")
    with pytest.raises(RequestError, match="no such exchange"):
        load_model("no-model", exchange="mpi")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_every_rank_has_the_embedding_where_the_options_say(
    place: Literal["cpu", "device"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    read = Loading.whole

    def whole(loading: Loading, *rest: Any) -> Any:
        seen.append(loading.embed_on_host)
        return read(loading, *rest)

    monkeypatch.setattr(Loading, "whole", whole)
    files = open_model(save(tiny_llama(), tmp_path / "model"))
    options = LoadOptions(device="cpu", embeddings_on=place)
    load_part(files, options, Rank(1, 2), get_table("cpu", threads=1))
    assert seen == [place == "cpu"]


def test_inputs_of_another_form_or_size_are_left_to_the_caller() -> None:
    """Inputs for trellis codes have no shape, but a number of rows."""
    sums = PeerSums.__new__(PeerSums)
    sums._shape = 3, WIDTH
    matrix: Any = SimpleNamespace(out_features=WIDTH)
    wide: Any = SimpleNamespace(out_features=WIDTH + 1)
    unknown: Any = object()
    memory = torch.empty(0, dtype=torch.uint8)
    assert not sums.multiply(unknown, matrix, defers=True)
    assert not sums.multiply(CudaTrellisInputs(matrix, 4, 0, 4, memory), matrix, defers=True)
    assert not sums.multiply(CudaTrellisInputs(wide, 3, 0, 3, memory), wide, defers=True)


def test_own_memory_is_freed_even_if_that_of_another_rank_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple[str, int]] = []

    class Library:
        def call(self, name: str, address: int) -> None:
            called.append((name, address))
            if address == 2:
                raise RuntimeError("cannot be closed")

    monkeypatch.setattr(cuda, "load", Library)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    with pytest.raises(RuntimeError, match="cannot be closed"):
        cuda_peers._free(CPU, 1, [2, 3])
    assert sorted(called) == [("shared_close", 2), ("shared_close", 3), ("shared_free", 1)]


class TwoKernels:
    """Products of a dense matrix, whose op that adds rounds as another kernel would."""

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    def linear_add_(self, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        return residual.add_((x @ w).half())


@pytest.mark.parametrize("count", [2, 3])
def test_both_kinds_of_exchange_sum_the_same_products(count: int) -> None:
    """Products that no kernel sends have the bits that the ranks sum through NCCL."""
    generator = torch.Generator().manual_seed(count)
    x, residual = (torch.randn(3, WIDTH, generator=generator) for _ in range(2))
    weights = torch.randn(count, WIDTH, WIDTH, generator=generator)

    def work(exchange: ThreadExchange) -> tuple[Tensor, Tensor]:
        inner: Any = TwoKernels()
        matrix: Any = weights[exchange.rank.index]
        sums: Any = ThreadSums(exchange, WIDTH)
        sums._sends = repeat(False)
        w: Any = PartialLinear(matrix)
        expected = SummingOps(inner, exchange).linear_add_(x, w, residual.clone())
        sums.begin(len(x))
        peers = PeerExchange(exchange, sums, FakeMemory(0))
        found = PeerOps(inner, peers, is_plain=True).linear_add_(x, w, residual.clone())
        return expected, found

    for expected, found in on_ranks(count, work):
        assert torch.equal(expected, found)


def test_small_and_odd_parts_are_left_to_the_other_exchange() -> None:
    gpu: Any = SimpleNamespace(device=CPU)
    large = LargeSums(gpu, 0, PeerBuffers((0, 0), MAX_ROWS, WIDTH, 1, large=1 << 20))
    least = LargeSums.MIN_VALUES
    assert large.takes(torch.ones(least))
    assert large.takes(torch.ones(1 << 10, 1 << 10))
    for part in (
        torch.ones(least - 8),
        torch.ones(least + 4),
        torch.ones(1 << 10, (1 << 10) - 4),  # packets would reach into the next row
        torch.ones((1 << 20) + 8),
        torch.ones(least).half(),
    ):
        assert not large.takes(part)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_places_of_large_sums_hold_the_shares_of_all_ranks(ranks: int) -> None:
    """They follow the other places, begin at multiples of 16 bytes and do not overlap."""
    most = (1 << 20) + 4
    small = PeerBuffers((0,) * ranks, MAX_ROWS, 100, 259)
    buffers = PeerBuffers((0,) * ranks, MAX_ROWS, 100, 259, most)
    share = 16 * -(-most // (8 * ranks))  # bytes
    places = buffers.large_parts_at(0), buffers.large_sums_at(0), buffers.flags_at(0)
    ends = (*places[1:], buffers.size_bytes)
    assert places[0] == small.size_bytes
    assert all(place % 16 == 0 for place in places)
    assert [end - place for place, end in zip(places, ends, strict=True)] == [
        share * ranks,
        share * ranks,
        4 * REDUCE_BLOCKS * (MAX_PEERS + 1),
    ]
