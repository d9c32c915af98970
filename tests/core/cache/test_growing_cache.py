"""Caches whose memory grows on a GPU: what is mapped, when, and how much of it.

The driver's functions have a stand-in here, which keeps the bookkeeping that the driver would do.
`tests/cuda/test_growing_memory.py` runs the driver itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_core.arch.layers import KVShape
from exl_core.cache.format import KVFormat
from exl_core.cache.page_pool import PageCopy
from exl_core.cache.store import KVStore
from exl_core.errors import OutOfMemoryError
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.backends.cuda.growing import GrowingBuffer, Memory, Range, promised_bytes
from support.limited_follower import limit_mapping
from support.profiles import examples

GRANULE = 1 << 12


class StandIn:
    """Addresses and mapped parts, as a driver keeps them. Memory is full of ones when mapped."""

    def __init__(self, granule: int = GRANULE, limit: int = 1 << 40) -> None:
        self.device = torch.device("cuda", 7)  # no tensor is there
        self.granule = granule
        self.limit = limit
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self._next = 1 << 30
        self._memory: dict[int, Tensor] = {}
        self.ranges: list[Range] = []

    def reserve(self, size: int) -> int:
        assert size % self.granule == 0
        address = self._next
        self._next += size + (1 << 30)
        self.reserved[address] = size
        return address

    def map(self, address: int, size: int) -> None:
        base = max(start for start in self.reserved if start <= address)
        assert address + size <= base + self.reserved[base]
        assert address % self.granule == size % self.granule == 0 < size
        for start, length in self.mapped.items():
            assert address >= start + length or address + size <= start, "mapped twice"
        if sum(self.mapped.values()) + size > self.limit:
            raise OutOfMemoryError("no memory")
        self.mapped[address] = size
        if base in self._memory:
            self._memory[base][address - base : address - base + size] = 255

    def tensor(self, whole: Range) -> Tensor:
        assert whole.address in self.mapped, "the start has memory"
        self.ranges.append(whole)
        self._memory[whole.address] = torch.full((whole.size,), 255, dtype=torch.uint8)
        return self._memory[whole.address]

    def release(self, whole: Range, parts: Iterable[tuple[int, int]]) -> None:
        for address, size in parts:
            assert self.mapped.pop(address) == size
        assert self.reserved.pop(whole.address) == whole.size

    def is_mapped(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self.mapped.items())


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(1, 40 * GRANULE),
    st.data(),
    st.lists(st.integers(1, 45 * GRANULE), max_size=8),
)
def test_a_buffer_has_zeroed_memory_where_it_was_asked_for(
    size: int, data: st.DataObject, steps: list[int]
) -> None:
    tail = data.draw(st.integers(1, size))
    memory = StandIn()
    buffer = GrowingBuffer(memory, size, tail)
    (address,) = memory.reserved
    for step in (1, *steps):
        buffer.grow(step)
        assert buffer.grown >= min(step, size)
        ends = {0, min(step, size) - 1, size - tail, size - 1}
        assert all(memory.is_mapped(address + place) for place in ends)
        assert buffer.held_bytes == sum(memory.mapped.values())
        assert buffer.held_bytes <= max([1, *steps]) + tail + 3 * GRANULE
        assert not buffer.bytes[: min(step, size)].any()
        assert not buffer.bytes[size - tail :].any()
    buffer.grow(size)
    assert buffer.held_bytes == memory.reserved[address]
    assert buffer.promised_bytes == 0
    del buffer
    memory.ranges.clear()
    gc.collect()
    assert not memory.mapped
    assert not memory.reserved


def test_growing_keeps_what_was_written() -> None:
    buffer = GrowingBuffer(StandIn(), 20 * GRANULE, 8)
    buffer.bytes[:GRANULE] = 3
    buffer.bytes[-8:] = 4
    buffer.grow(10 * GRANULE)
    buffer.grow(20 * GRANULE)
    assert buffer.bytes[:GRANULE].eq(3).all()
    assert buffer.bytes[-8:].eq(4).all()
    assert not buffer.bytes[GRANULE:-8].any()


SHAPES = [KVShape(2, 32)] * 3
PAGE_BYTES = 256 * 2 * 32 * 2


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Stand-in for the GPU's memory, which every store of the test uses."""
    memory = StandIn()

    def growing_memory(store: KVStore, where: torch.device) -> Memory:
        return memory

    monkeypatch.setattr(KVStore, "_growing_memory", growing_memory)
    return memory


def test_a_store_takes_memory_as_pages_are_used(memory: StandIn) -> None:
    store = KVStore(KVFormat.FP16, SHAPES, 200)
    tensors = 2 * len(SHAPES)
    assert store.held_bytes == sum(memory.mapped.values())
    assert store.held_bytes <= tensors * (2 * GRANULE + PAGE_BYTES + GRANULE)
    assert promised_bytes(memory.device) == sum(memory.reserved.values()) - store.held_bytes
    steps = 0
    for pages in range(1, 201):
        before = store.held_bytes
        store.grow(pages)
        steps += store.held_bytes > before
        bound = tensors * (max(1.25 * pages, 1) * PAGE_BYTES + PAGE_BYTES + 2 * GRANULE)
        assert pages * tensors * PAGE_BYTES <= store.held_bytes <= bound
    assert steps < 40  # not one for each page
    assert store.held_bytes == sum(memory.reserved.values())
    assert promised_bytes(memory.device) == 0


def test_copies_and_moves_have_memory(memory: StandIn) -> None:
    store = KVStore(KVFormat.FP16, SHAPES, 100)
    store.grow(2)
    store.layer(1).keys[1] = 2.0
    store.copy_pages([PageCopy(1, 40, 256)])
    assert store.layer(1).keys[40].eq(2.0).all()
    store.move_pages([(40, 70)])
    assert store.layer(1).keys[70].eq(2.0).all()
    other = KVStore(KVFormat.FP16, SHAPES, 100)
    store.transfer_pages(other, [(70, 90)])
    assert other.layer(1).keys[90].eq(2.0).all()
    assert other.held_bytes > 90 * 2 * len(SHAPES) * PAGE_BYTES


def test_a_store_that_finds_no_memory_keeps_its_contents(memory: StandIn) -> None:
    store = KVStore(KVFormat.FP16, SHAPES, 100)
    store.grow(10)
    store.layer(0).keys[:10] = 1.0
    memory.limit = store.held_bytes + 3 * PAGE_BYTES
    with pytest.raises(OutOfMemoryError):
        store.grow(50)
    assert store.layer(0).keys[:10].eq(1.0).all()
    memory.limit = 1 << 40
    store.grow(50)
    assert store.layer(0).keys[:10].eq(1.0).all()
    assert not store.layer(2).values[:50].any()


def test_the_pages_that_a_segment_writes() -> None:
    def last(past_len: int, count: int) -> int:
        pages = tuple(range(90, 80, -1))
        segment = Segment((1,) * count, past_len, pages, LogitRows.LAST)
        return segment.last_written_page(256)

    assert last(0, 1) == 90
    assert last(0, 700) == 90
    assert last(256, 1) == 89
    assert last(255, 2) == 90
    assert last(600, 168) == 88


def test_the_limit_of_a_rank_in_a_test_holds_for_its_cache() -> None:
    """A cache takes its memory from the driver, where a limit of torch has no effect."""

    class Limited(StandIn):
        pass

    limit_mapping(Limited, 4 * GRANULE)
    buffer = GrowingBuffer(Limited(), 10 * GRANULE, tail=1)
    buffer.grow(3 * GRANULE)
    with pytest.raises(OutOfMemoryError, match="too little memory"):
        buffer.grow(4 * GRANULE)
    assert buffer.grown == 3 * GRANULE
