"""Pages of the key-value cache: who holds them, what they contain, which may be reused.

A page is `page_size` consecutive positions of one sequence, in every layer at once. This module
does the bookkeeping only: it knows page numbers and token ids, and neither tensors nor precision
(`store.py`) nor the order in which sequences run (`engine/scheduler.py`).

What a page holds has a key: a hash of its token ids and of the key of the page before it, so that
a key stands for a whole prefix. A full page whose contents are known is found by later sequences
with the same prefix, held by someone or not, and shared. A page that is not full, or holds another
continuation of the same prefix, cannot be shared; its first positions can be copied.

Invariants, checked after every call in the property tests:
  * a page is free, cached or held, and exactly one of them;
  * a held page has a reference count equal to the number of times that it is held;
  * a cached page's contents are known, a free page's are not; what is known of a held page is true
    of its first positions and stays so, whatever its holder writes behind them;
  * a key belongs to one page, a page has at most one key;
  * no cached page holds only what another known page begins with: it would be of no use.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from exl_core.cache.format import PAGE_SIZE

PageKey = bytes
NO_KEY: PageKey = b""
"""What stands before the first page. Caches that must not share pages start from another value."""
MIN_RUN = 2
"""Fewer positions are not worth a copy."""


def page_key(previous: PageKey, token_ids: Sequence[int]) -> PageKey:
    """Key of these tokens behind that prefix. 128 bits: two prefixes will not meet by chance."""
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
        """`other`, which follows the same page, holds all of this, and perhaps more."""
        return other.token_ids[: len(self.token_ids)] == self.token_ids


class PageRun(NamedTuple):
    """The first `length` positions of a page."""

    page_id: int
    length: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Since the pool was made.

    allocated     pages handed out
    evicted       of these, pages whose known contents were given up for it
    hits          pages that did not have to be allocated, because a prefix was known
    partial_hits  pages whose first positions did not have to be computed
    """

    allocated: int = 0
    evicted: int = 0
    hits: int = 0
    partial_hits: int = 0


class PagePool:
    """Hands out pages, counts who holds them, and remembers the contents of those given back."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_allocated = self._num_evicted = self._num_hits = self._num_partial_hits = 0
        self._allocated_before = 0  # by the last defragmentation
        self.reset()

    def reset(self) -> None:
        """Every page is free and nothing is remembered. Holders must have let go, or be gone."""
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
        """Pages that nobody holds and that still have their contents, next to be evicted first."""
        return tuple(self._cached)

    @property
    def held_pages(self) -> Mapping[int, int]:
        """Reference counts."""
        return MappingProxyType(self._references)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out, evicting where it must."""
        return len(self._free) + len(self._cached)

    @property
    def stats(self) -> PoolStats:
        return PoolStats(
            self._num_allocated, self._num_evicted, self._num_hits, self._num_partial_hits
        )

    def contents_of(self, page_id: int) -> PageContents | None:
        """As far as they are known; a held page may hold more."""
        return self._contents.get(page_id)

    def is_shared(self, page_id: int) -> bool:
        """The page is held more than once: none of the holders may write to it."""
        return self._references.get(page_id, 0) > 1

    def describe(self) -> str:
        """One character a page: its reference count, `+` from ten on, `.` if it is free.

        So `0` is a cached page: nobody holds it, and it is not free.
        """
        counts = [self._references.get(page_id, 0) for page_id in range(self.num_pages)]
        signs = [str(count) if count < 10 else "+" for count in counts]
        for page_id in self._free:
            signs[page_id] = "."
        return "".join(signs)

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """Pages that hold the longest known prefix of `keys`. They are found, not yet held."""
        found: list[int] = []
        for key in keys:
            page_id = self._page_of.get(key)
            if page_id is None:
                break
            found.append(page_id)
        return found

    def find_run(self, previous: PageKey, token_ids: Sequence[int]) -> PageRun | None:
        """The known page behind `previous` that has most of `token_ids` at its beginning.

        For one who is about to copy it: it counts as used now.
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
        """How many of these someone holds: holding them again takes nothing from the others."""
        return sum(page_id in self._references for page_id in page_ids)

    def hold(self, page_ids: Iterable[int]) -> None:
        """One more reference to each of these, which are cached or held and were found."""
        for page_id in page_ids:
            self._num_hits += 1
            self._hold(page_id)

    def allocate(self, count: int) -> list[int] | None:
        """This many pages of unknown contents, held once; None, and no change, if too few are left.

        Free pages first; then the least recently used cached ones, whose contents are forgotten.
        """
        if count > self.num_available:
            return None
        page_ids = []
        for _ in range(count):
            if self._free:
                page_id = self._free.pop()
            else:
                page_id, _ = self._cached.popitem(last=False)
                self._unlearn(page_id)
                self._num_evicted += 1
            self._references[page_id] = 1
            page_ids.append(page_id)
        self._num_allocated += count
        return page_ids

    def register(self, page_id: int, contents: PageContents) -> int:
        """The held page is full and has these contents; later `find`s will see it.

        If another page has these contents already, the caller is moved to that one: its reference
        goes over, and the page that it brought is given back. Returns the page now held.
        """
        known = self._page_of.get(contents.key)
        if known == page_id:
            return page_id
        if known is not None:
            self._hold(known)
            self.release((page_id,))
            return known
        self._learn(page_id, contents)
        return page_id

    def note(self, page_id: int, contents: PageContents) -> None:
        """The held page, which is not full, begins with this; later `find_run`s will see it.

        Its holder goes on filling it, so it stays where it is; what another page has is not noted.
        """
        if len(contents.token_ids) >= MIN_RUN and not self._is_elsewhere(page_id, contents):
            self._learn(page_id, contents)

    def forget(self, page_ids: Iterable[int]) -> None:
        """What these pages hold is not to be found again: it is bad, or to be overwritten."""
        for page_id in page_ids:
            self._unlearn(page_id)
            if page_id in self._cached:
                del self._cached[page_id]
                self._free.append(page_id)

    def release(self, page_ids: Sequence[int]) -> None:
        """One reference less to each. A page nobody holds is cached if its contents are known.

        Pages are given in the order of the sequence and let go from its end: a page is of no use
        without those before it, so the end of a prefix is evicted before its beginning.
        """
        for page_id in reversed(page_ids):
            self._references[page_id] -= 1
            if self._references[page_id]:
                continue
            del self._references[page_id]
            contents = self._contents.get(page_id)
            if contents is not None and not self._is_elsewhere(page_id, contents):
                self._cached[page_id] = None
            else:
                self._unlearn(page_id)
                self._free.append(page_id)

    def defragmentation_pays(self) -> bool:
        """Nobody holds a page, the pool went round since the last time, and over 10 % would move.

        Pages of one sequence that lie side by side are read in one stroke.
        """
        if self._references or self._num_allocated - self._allocated_before < self.num_pages:
            return False
        num_moves = sum(page_id != place for place, page_id in enumerate(self._layout()))
        return 10 * num_moves > self.num_pages

    def defragment(self) -> list[tuple[int, int]]:
        """Put the cached pages together, chain by chain, the oldest chain first.

        Returns what moved, (from, to). All of it moves at once: a page may go where another was.
        """
        if self._references:
            raise AssertionError(f"pages {sorted(self._references)} are held and cannot move")
        self._allocated_before = self._num_allocated
        place_of = {page_id: place for place, page_id in enumerate(self._layout())}
        contents = {place_of[page_id]: known for page_id, known in self._contents.items()}
        cached = OrderedDict((place_of[page_id], None) for page_id in self._cached)
        self.reset()
        del self._free[self.num_pages - len(cached) :]  # the lowest numbers, at the list's end
        self._cached = cached
        for page_id in cached:
            self._learn(page_id, contents[page_id])
        return [move for move in place_of.items() if move[0] != move[1]]

    def _layout(self) -> list[int]:
        """Cached pages in the order in which they should lie. A chain is a page, the most recent
        one that continues it, and so on; a branch is a chain of its own."""
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

    def _is_elsewhere(self, page_id: int, contents: PageContents) -> bool:
        """Another known page begins with these contents."""
        return any(
            contents.begins(self._contents[other])
            for other in self._after.get(contents.previous, ())
            if other != page_id
        )

    def _learn(self, page_id: int, contents: PageContents) -> None:
        old = self._contents.get(page_id)
        if old is not None:
            if old.previous != contents.previous or not old.begins(contents):
                raise AssertionError(f"page {page_id} got a second key")
            self._unlearn(page_id)
        covered = [
            other
            for other in self._after.get(contents.previous, ())
            if other in self._cached and self._contents[other].begins(contents)
        ]
        self.forget(covered)
        self._contents[page_id] = contents
        self._page_of[contents.key] = page_id
        self._after.setdefault(contents.previous, {})[page_id] = None

    def _unlearn(self, page_id: int) -> None:
        contents = self._contents.pop(page_id, None)
        if contents is None:
            return
        del self._page_of[contents.key]
        siblings = self._after[contents.previous]
        del siblings[page_id]
        if not siblings:
            del self._after[contents.previous]


def _common_run(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
