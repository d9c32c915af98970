"""Pages of the key-value cache: reference counts, known contents, reuse and eviction.

A page is `page_size` consecutive positions of one sequence, in every layer at once. This module
does the bookkeeping only: it knows page numbers and token ids, and neither tensors nor precision
(`store.py`) nor the order in which sequences run (`engine/scheduler.py`).

The contents of a page have a key: a hash of its token ids and of the key of the page before it. A
key therefore identifies a whole prefix. A full page whose contents are known is shared with later
sequences that have the same prefix, whether or not a sequence holds it. A page that is not full, or
that holds another continuation of the same prefix, cannot be shared, but its first positions can be
copied.

Invariants, checked after every call in the property tests:
  * a page is in exactly one state: free, cached or held;
  * a held page has a reference count equal to the number of times that it is held;
  * the contents of a cached page are known, those of a free page are not; known contents of a held
    page are its first positions, and stay valid when its holder writes positions after them;
  * a key belongs to one page, a page has at most one key;
  * the contents of a cached page are never a prefix of another known page, which would make the
    cached page useless.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from exl_core.cache.format import PAGE_SIZE

PageKey = bytes
NO_KEY: PageKey = b""
"""Key before the first page. Caches that must not share pages start from a different value."""
MIN_RUN = 2
"""Smallest number of positions that is worth a copy."""


def page_key(previous: PageKey, token_ids: Sequence[int]) -> PageKey:
    """Key of `token_ids` after the prefix `previous`. With 128 bits, collisions are negligible."""
    return blake2b(previous + array("q", token_ids).tobytes(), digest_size=16).digest()


def page_keys(
    token_ids: Sequence[int], page_size: int = PAGE_SIZE, *, root: PageKey = NO_KEY
) -> list[PageKey]:
    """Keys of all full pages of a sequence, first to last."""
    keys: list[PageKey] = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        previous = keys[-1] if keys else root
        keys.append(page_key(previous, token_ids[start : start + page_size]))
    return keys


class PageContents(NamedTuple):
    """The tokens of a page's first positions; `previous` is the key of the page before it."""

    previous: PageKey
    token_ids: tuple[int, ...]
    key: PageKey

    @classmethod
    def of(cls, previous: PageKey, token_ids: Iterable[int]) -> PageContents:
        ids = tuple(token_ids)
        return cls(previous, ids, page_key(previous, ids))

    def begins(self, other: PageContents) -> bool:
        """Whether these tokens are a prefix of `other`'s. Both must follow the same page."""
        return other.token_ids[: len(self.token_ids)] == self.token_ids


class PageCopy(NamedTuple):
    """Copies the first `length` positions of page `source` to page `target`, in every layer."""

    source: int
    target: int
    length: int


class PageRun(NamedTuple):
    """The first `length` positions of a page."""

    page_id: int
    length: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts since the pool was created.

    allocated     pages handed out
    evicted       allocated pages whose cached contents were discarded
    hits          pages that were shared instead of allocated, because a prefix was known
    partial_hits  pages whose first positions were copied instead of computed
    """

    allocated: int = 0
    evicted: int = 0
    hits: int = 0
    partial_hits: int = 0


class PagePool:
    """Hands out pages, counts references, and remembers the contents of released pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_allocated = self._num_evicted = self._num_hits = self._num_partial_hits = 0
        self._allocated_before = 0  # by the last defragmentation
        self.on_discard: Callable[[PageContents], None] | None = None
        """Called with contents that no page has any more. A longer page may begin with them."""
        self.reset()

    def reset(self) -> None:
        """Makes every page free and forgets all contents. No holder may use its pages
        afterwards."""
        self._free = list(range(self.num_pages - 1, -1, -1))  # the lowest number goes out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references: dict[int, int] = {}
        self._contents: dict[int, PageContents] = {}
        self._page_of: dict[PageKey, int] = {}
        self._after: dict[PageKey, dict[int, None]] = {}  # pages by `previous` of their contents

    @property
    def free_pages(self) -> frozenset[int]:
        return frozenset(self._free)

    @property
    def cached_pages(self) -> tuple[int, ...]:
        """Pages with known contents that no sequence holds, in order of eviction."""
        return tuple(self._cached)

    @property
    def held_pages(self) -> Mapping[int, int]:
        """Reference counts."""
        return MappingProxyType(self._references)

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` can hand out, including by eviction."""
        return len(self._free) + len(self._cached)

    @property
    def stats(self) -> PoolStats:
        return PoolStats(
            self._num_allocated, self._num_evicted, self._num_hits, self._num_partial_hits
        )

    def known_after(self, previous: PageKey) -> Iterator[PageContents]:
        """Known contents of pages after the page with this key."""
        return (self._contents[page_id] for page_id in self._after.get(previous, ()))

    def contents_of(self, page_id: int) -> PageContents | None:
        """Known contents of a page. A held page may contain more positions than these."""
        return self._contents.get(page_id)

    def is_shared(self, page_id: int) -> bool:
        """Whether the page has several holders. None of them may write to a shared page."""
        return self._references.get(page_id, 0) > 1

    def describe(self) -> str:
        """One character per page: its reference count, `+` for ten or more, `.` if it is free.

        `0` is a cached page, which has no holder and is not free.
        """
        counts = [self._references.get(page_id, 0) for page_id in range(self.num_pages)]
        signs = [str(count) if count < 10 else "+" for count in counts]
        for page_id in self._free:
            signs[page_id] = "."
        return "".join(signs)

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """Pages of the longest known prefix of `keys`. The caller must `hold` them to keep them."""
        found: list[int] = []
        for key in keys:
            page_id = self._page_of.get(key)
            if page_id is None:
                break
            found.append(page_id)
        return found

    def find_run(self, previous: PageKey, token_ids: Sequence[int]) -> PageRun | None:
        """The known page after `previous` that has the longest common prefix with `token_ids`.

        The caller copies the run, so the page becomes the most recently used one.
        """
        wanted = tuple(token_ids)
        best: PageRun | None = None
        length = MIN_RUN - 1
        for page_id in self._after.get(previous, ()):
            known = self._contents[page_id].token_ids
            if len(known) <= length or known[: length + 1] != wanted[: length + 1]:
                continue
            length = _common_run(known, wanted)
            best = PageRun(page_id, length)
            if length == len(wanted):
                break
        if best is not None:
            self._num_partial_hits += 1
            if best.page_id in self._cached:
                self._cached.move_to_end(best.page_id)
        return best

    def num_held_among(self, page_ids: Iterable[int]) -> int:
        """Number of these pages that are held. Holding one again does not lower `num_available`."""
        return sum(page_id in self._references for page_id in page_ids)

    def hold(self, page_ids: Iterable[int]) -> None:
        """Adds one reference to each of these pages, which are cached or held (see `find`)."""
        for page_id in page_ids:
            self._num_hits += 1
            self._hold(page_id)

    def allocate(self, count: int) -> list[int] | None:
        """Hands out `count` pages of unknown contents, each with one reference. Returns None and
        changes nothing if too few are available.

        Takes free pages first, then evicts the least recently used cached pages.
        """
        if count > self.num_available:
            return None
        page_ids = []
        for _ in range(count):
            if self._free:
                page_id = self._free.pop()
            else:
                page_id, _ = self._cached.popitem(last=False)
                self._discard_contents(page_id)
                self._num_evicted += 1
            self._references[page_id] = 1
            page_ids.append(page_id)
        self._num_allocated += count
        return page_ids

    def register(self, page_id: int, contents: PageContents) -> int:
        """Records the contents of a held page that is full, so that `find` can return it.

        If another page already has these contents, the caller's reference moves to that page, and
        `page_id` is released. Returns the page that the caller now holds.
        """
        known = self._page_of.get(contents.key)
        if known == page_id:
            return page_id
        if known is not None:
            self._hold(known)
            self.release((page_id,))
            return known
        self._set_contents(page_id, contents)
        return page_id

    def note(self, page_id: int, contents: PageContents) -> None:
        """Records the first tokens of a held page that is not full, so that `find_run` can return
        it.

        The holder keeps the page and goes on filling it. Does nothing if another known page begins
        with these tokens.
        """
        if len(contents.token_ids) >= MIN_RUN and not self._is_in_other_page(page_id, contents):
            self._set_contents(page_id, contents)

    def forget(self, page_ids: Iterable[int]) -> None:
        """Makes the contents of these pages unknown, because they are invalid or will be
        overwritten."""
        for page_id in page_ids:
            self._discard_contents(page_id)
            if page_id in self._cached:
                del self._cached[page_id]
                self._free.append(page_id)

    def release(self, page_ids: Sequence[int]) -> None:
        """Removes one reference from each page. A page without references is cached if its contents
        are known, else free.

        `page_ids` are in the order of the sequence, and the last one is released first: a page is
        useless without those before it, so the end of a prefix must be evicted before its
        beginning.
        """
        for page_id in reversed(page_ids):
            self._references[page_id] -= 1
            if self._references[page_id]:
                continue
            del self._references[page_id]
            contents = self._contents.get(page_id)
            if contents is not None and not self._is_in_other_page(page_id, contents):
                self._cached[page_id] = None
            else:
                self._discard_contents(page_id)
                self._free.append(page_id)

    def defragmentation_pays(self) -> bool:
        """Whether no page is held, at least `num_pages` pages were allocated since the last time,
        and more than 10 % of the pages would move.

        Adjacent pages of one sequence are read as one contiguous range.
        """
        if self._references or self._num_allocated - self._allocated_before < self.num_pages:
            return False
        num_moves = sum(page_id != target for target, page_id in enumerate(self._layout()))
        return 10 * num_moves > self.num_pages

    def defragment(self) -> list[tuple[int, int]]:
        """Renumbers the cached pages so that each chain is contiguous, the oldest chain first.

        Returns the moves as (source, target). They are simultaneous: a target may be the source of
        another move.
        """
        if self._references:
            raise AssertionError(f"pages {sorted(self._references)} are held and cannot move")
        self._allocated_before = self._num_allocated
        target_of = {page_id: target for target, page_id in enumerate(self._layout())}
        contents = {target_of[page_id]: known for page_id, known in self._contents.items()}
        cached = OrderedDict((target_of[page_id], None) for page_id in self._cached)
        self.reset()
        del self._free[self.num_pages - len(cached) :]  # the lowest numbers, at the list's end
        self._cached = cached
        for page_id in cached:
            self._set_contents(page_id, contents[page_id])
        return [move for move in target_of.items() if move[0] != move[1]]

    def _layout(self) -> list[int]:
        """Cached pages in their order after defragmentation. A chain is a page, followed by the
        most recent page that continues it, and so on. Other continuations are chains of their
        own."""
        age = {page_id: i for i, page_id in enumerate(self._cached)}  # the most recent is largest
        chains: list[list[int]] = []
        left = set(self._cached)
        for newest in reversed(self._cached):
            if newest not in left:
                continue
            head = newest
            parent = self._page_of.get(self._contents[head].previous)
            while parent in left:
                head = parent
                parent = self._page_of.get(self._contents[head].previous)
            chain: list[int] = []
            following: int | None = head
            while following is not None:
                chain.append(following)
                left.remove(following)
                branches = self._after.get(self._contents[following].key, {}).keys() & left
                following = max(branches, key=age.__getitem__, default=None)
            chains.append(chain)
        return [page_id for chain in reversed(chains) for page_id in chain]

    def _hold(self, page_id: int) -> None:
        if page_id in self._references:
            self._references[page_id] += 1
        else:
            del self._cached[page_id]
            self._references[page_id] = 1

    def _is_in_other_page(self, page_id: int, contents: PageContents) -> bool:
        """Whether another known page begins with these contents."""
        return any(
            contents.begins(self._contents[other])
            for other in self._after.get(contents.previous, ())
            if other != page_id
        )

    def _set_contents(self, page_id: int, contents: PageContents) -> None:
        old = self._contents.get(page_id)
        if old is not None:
            if old.previous != contents.previous or not old.begins(contents):
                raise AssertionError(f"page {page_id} got a second key")
            self._clear_contents(page_id)
        covered = [
            other
            for other in self._after.get(contents.previous, ())
            if other in self._cached and self._contents[other].begins(contents)
        ]
        self._contents[page_id] = contents
        self._page_of[contents.key] = page_id
        self._after.setdefault(contents.previous, {})[page_id] = None
        self.forget(covered)

    def _discard_contents(self, page_id: int) -> None:
        contents = self._contents.get(page_id)
        self._clear_contents(page_id)
        if contents is not None and self.on_discard is not None:
            self.on_discard(contents)

    def _clear_contents(self, page_id: int) -> None:
        contents = self._contents.pop(page_id, None)
        if contents is None:
            return
        del self._page_of[contents.key]
        siblings = self._after[contents.previous]
        del siblings[page_id]
        if not siblings:
            del self._after[contents.previous]


def _common_run(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
