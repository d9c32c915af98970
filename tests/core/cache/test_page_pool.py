"""Page pool: after any call, every page is free, cached or held, and exactly one of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exl_core.cache.page_pool import (
    NO_KEY,
    PageContents,
    PagePool,
    PageRun,
    PoolStats,
    page_key,
    page_keys,
)
from support.profiles import examples


def contents(text: str) -> PageContents:
    """Contents of the last page of a prefix whose pages hold one letter each."""
    return PageContents(text[:-1].encode(), (ord(text[-1]),), text.encode())


def test_a_key_identifies_the_whole_prefix() -> None:
    ids = list(range(1000))
    keys = page_keys(ids)
    assert len(keys) == 3  # the last 232 tokens do not fill a page
    assert keys == page_keys(ids[:768])
    assert page_keys([7, *ids[1:]])[1:] != keys[1:], "a page's key depends on the pages before it"
    assert page_keys(ids[256:])[0] != keys[1]
    assert page_key(keys[0], ids[256:512]) == keys[1]
    assert page_keys(ids, root=b"another adapter") != keys


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3)
    first = pool.allocate(2)
    assert first is not None
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    assert pool.allocate(0) == []


def test_released_pages_are_found_again() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2) or []
    for page, text in zip(pages, ("a", "ab"), strict=True):
        assert pool.register(page, contents(text)) == page
    pool.release(pages)
    assert pool.find([b"a", b"ab", b"abc"]) == pages
    assert pool.find([b"x", b"ab"]) == [], "a page without its predecessor is not found"
    pool.hold(pages)
    assert dict(pool.held_pages) == dict.fromkeys(pages, 1)


def test_eviction_is_least_recently_used_and_from_the_end_of_a_prefix() -> None:
    pool = PagePool(4)
    old, new = pool.allocate(2) or [], pool.allocate(2) or []
    for page, text in zip(old + new, ("o", "oo", "n", "nn"), strict=True):
        pool.register(page, contents(text))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.find([b"o", b"oo"]) == [old[0]]
    assert pool.allocate(1) == [old[0]]
    assert pool.find([b"n", b"nn"]) == new
    pool.hold(pool.find([b"n"]))
    pool.release(new[:1])  # now the most recently used
    assert pool.allocate(1) == [new[1]]


def test_pages_with_equal_contents_are_merged() -> None:
    pool = PagePool(3)
    (mine,) = pool.allocate(1) or []
    (yours,) = pool.allocate(1) or []
    assert pool.register(mine, contents("k")) == mine
    assert pool.register(yours, contents("k")) == mine
    assert dict(pool.held_pages) == {mine: 2}
    assert yours in pool.free_pages


def test_forgotten_pages_are_not_found() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2) or []
    pool.register(pages[0], contents("k"))
    pool.register(pages[1], contents("l"))
    pool.release(pages[:1])
    pool.forget(pages)
    assert pool.find([b"k"]) == []
    assert pool.free_pages == {pages[0]}
    pool.release(pages[1:])
    assert pool.free_pages == set(pages)


def test_a_page_cannot_have_two_keys() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1) or []
    pool.register(page, contents("k"))
    with pytest.raises(AssertionError, match="second key"):
        pool.register(page, contents("l"))


def test_the_longest_run_after_a_prefix_is_found() -> None:
    pool = PagePool(4)
    pages = pool.allocate(4) or []
    first = PageContents.of(NO_KEY, (1, 2, 3, 4))
    pool.register(pages[0], first)
    pool.note(pages[1], PageContents.of(first.key, (5, 6)))
    pool.note(pages[2], PageContents.of(first.key, (5, 7, 8)))
    pool.note(pages[3], PageContents.of(first.key, (9,)))
    assert pool.find_run(first.key, (5, 7, 8, 8)) == PageRun(pages[2], 3)
    assert pool.find_run(first.key, (5, 7, 9)) == PageRun(pages[2], 2)
    assert pool.find_run(first.key, (5, 6)) == PageRun(pages[1], 2)
    assert pool.find_run(NO_KEY, (1, 2, 9)) == PageRun(pages[0], 2)
    assert pool.find_run(first.key, (5, 9)) is None, "one position is not worth a copy"
    assert pool.find_run(first.key, (9, 9)) is None
    assert pool.find_run(b"x", (5, 6)) is None
    assert pool.find([NO_KEY]) == []
    assert pool.stats == PoolStats(allocated=4, partial_hits=4)


def test_a_page_found_for_copying_counts_as_used() -> None:
    pool = PagePool(2)
    a, b = pool.allocate(2) or []
    pool.note(a, PageContents.of(NO_KEY, (1, 1)))
    pool.note(b, PageContents.of(NO_KEY, (2, 2)))
    pool.release([a])
    pool.release([b])
    pool.find_run(NO_KEY, (1, 1))
    assert pool.allocate(1) == [b]
    assert pool.stats.evicted == 1


def test_a_cached_page_is_freed_once_another_page_contains_it() -> None:
    pool = PagePool(3)
    a, b, c = pool.allocate(3) or []
    pool.note(a, PageContents.of(NO_KEY, (1, 2)))
    pool.release([a])
    pool.note(b, PageContents.of(NO_KEY, (1, 2, 3)))
    assert pool.free_pages == {a}
    pool.note(c, PageContents.of(NO_KEY, (1, 2, 3)))
    assert pool.contents_of(c) is None
    pool.note(c, PageContents.of(NO_KEY, (1, 2, 4)))
    pool.release([b, c])
    assert pool.cached_pages == (c, b)


def test_describe_shows_one_character_per_page() -> None:
    pool = PagePool(4)
    a, b, c = pool.allocate(3) or []
    for page, text in ((a, "a"), (b, "b")):
        pool.register(page, contents(text))
    pool.release([a])
    for _ in range(9):
        pool.hold([b])
    pool.hold([c])
    assert pool.describe() == "0+2."


def test_defragmentation_makes_chains_contiguous_oldest_first() -> None:
    pool = PagePool(8)
    pages = pool.allocate(8) or []
    texts = ("z", "b", "o", "abc", "a", "ax", "oo", "ab")
    for page, text in zip(pages, texts, strict=True):
        pool.register(page, contents(text))
    page_of = dict(zip(texts, pages, strict=True))
    pool.forget([page_of["z"]])
    for chain in (["z"], ["a", "ax"], ["o", "oo"], ["b"], ["a", "ab", "abc"]):
        if chain[-1] == "abc":
            pool.hold([page_of["a"]])
        pool.release([page_of[text] for text in chain])
    assert pool.defragmentation_pays()
    moves = dict(pool.defragment())
    layout = ["ax", "o", "oo", "b", "a", "ab", "abc"]
    for target, text in enumerate(layout):
        assert moves.get(page_of[text], page_of[text]) == target
        assert pool.contents_of(target) == contents(text)
    assert pool.cached_pages == (0, 2, 1, 3, 6, 5, 4), "the order of eviction has not changed"
    assert pool.free_pages == {7}
    assert pool.find([b"a", b"ab", b"abc"]) == [4, 5, 6]
    assert not pool.defragmentation_pays()
    assert pool.defragment() == []


def test_defragmentation_waits_until_it_pays() -> None:
    pool = PagePool(20)
    pool.release(pool.allocate(10) or [])
    pages = pool.allocate(10) or []
    assert not pool.defragmentation_pays(), "pages are held"
    with pytest.raises(AssertionError, match="held"):
        pool.defragment()
    for page, text in zip(pages[7:], ("a", "ab", "abc"), strict=True):
        pool.register(page, contents(text))
    pool.release(pages)
    assert pool.defragmentation_pays(), "20 allocations, and three of 20 pages would move"
    pool.forget(pool.find([b"a", b"ab", b"abc"])[2:])
    assert not pool.defragmentation_pays(), "two of 20 are 10 %, not more"


class PoolMachine(RuleBasedStateMachine):
    """Random sequences start, grow, share pages and stop; a simple model tracks the holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.holders: list[tuple[str, list[int]]] = []  # (text with one letter per page, pages)
        self.contents: dict[int, str] = {}

    @rule(text=st.text("ab", max_size=5))
    def start(self, text: str) -> None:
        """The engine's calls: find a prefix, hold it, allocate the rest, fill it."""
        keys = [text[: i + 1].encode() for i in range(len(text))]
        found = self.pool.find(keys)
        for i, page in enumerate(found):
            assert self.contents[page] == text[: i + 1]
        before = dict(self.pool.held_pages)
        self.pool.hold(found)
        fresh = self.pool.allocate(len(text) - len(found))
        if fresh is None:
            self.pool.release(found)
            assert dict(self.pool.held_pages) == before
            return
        pages = list(found)
        for i, page in enumerate(fresh, start=len(found)):
            self.contents[page] = text[: i + 1]
            pages.append(self.pool.register(page, contents(text[: i + 1])))
        self.holders.append((text, pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.holders) - 1))
        _, pages = self.holders.pop(i)
        self.pool.release(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow_without_filling(self, data: st.DataObject) -> None:
        _, pages = data.draw(st.sampled_from(self.holders))
        pages += self.pool.allocate(1) or []

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        _, pages = data.draw(st.sampled_from(self.holders))
        self.pool.forget(pages)

    @invariant()
    def every_page_has_exactly_one_state(self) -> None:
        free, cached = self.pool.free_pages, self.pool.cached_pages
        held = self.pool.held_pages
        assert sorted([*free, *cached, *held]) == list(range(6))
        assert self.pool.num_available == len(free) + len(cached)

    @invariant()
    def reference_counts_equal_the_holders(self) -> None:
        counts = Counter(page for _, pages in self.holders for page in pages)
        assert dict(self.pool.held_pages) == dict(counts)

    @invariant()
    def cached_pages_have_contents_and_free_pages_none(self) -> None:
        assert all(self.pool.contents_of(page) for page in self.pool.cached_pages)
        assert not any(self.pool.contents_of(page) for page in self.pool.free_pages)

    def teardown(self) -> None:
        for _, pages in self.holders:
            self.pool.release(pages)
        assert not self.pool.held_pages
        assert self.pool.num_available == 6


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
)
