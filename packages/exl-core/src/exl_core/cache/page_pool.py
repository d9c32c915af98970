"""Pages of the key-value cache: who holds them, what they contain, which may be reused.

A page is `page_size` consecutive positions of one sequence, in every layer at once. This module
does the bookkeeping only: it knows page numbers and keys, and neither tensors nor precision
(`store.py`) nor the order in which sequences run (`engine/scheduler.py`).

A full page has a key: a hash of its token ids and of the key of the page before it, so that a key
stands for the whole prefix that ends with the page. A page whose key is registered is found by
later sequences with the same prefix, held by someone or not.

Invariants, checked after every call in the property tests:
  * a page is free, cached or held, and exactly one of them;
  * a held page has a reference count equal to the number of times that it is held;
  * a cached page has a key; a key belongs to one page, a page has at most one key.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

from exl_core.cache.format import PAGE_SIZE

PageKey = bytes
NO_KEY: PageKey = b""
"""What stands before the first page. Caches that must not share pages start from another value."""


def page_key(previous: PageKey, token_ids: Sequence[int]) -> PageKey:
    """Key of a full page. 128 bits: two different prefixes will not meet by chance."""
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


class PagePool:
    """Hands out pages, counts who holds them, and remembers the contents of those given back."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        """Every page is free and nothing is remembered. Holders must have let go, or be gone."""
        self._free = list(range(self.num_pages - 1, -1, -1))  # the lowest number goes out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references: dict[int, int] = {}
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}

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

    def key_of(self, page_id: int) -> PageKey | None:
        return self._key_of.get(page_id)

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """Pages that hold the longest known prefix of `keys`. They are found, not yet held."""
        found: list[int] = []
        for key in keys:
            page_id = self._page_of.get(key)
            if page_id is None:
                break
            found.append(page_id)
        return found

    def num_held_among(self, page_ids: Iterable[int]) -> int:
        """How many of these someone holds: holding them again takes nothing from the others."""
        return sum(page_id in self._references for page_id in page_ids)

    def hold(self, page_ids: Iterable[int]) -> None:
        """One more reference to each of these, which are cached or held."""
        for page_id in page_ids:
            if page_id in self._references:
                self._references[page_id] += 1
            else:
                del self._cached[page_id]
                self._references[page_id] = 1

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
                del self._page_of[self._key_of.pop(page_id)]
            self._references[page_id] = 1
            page_ids.append(page_id)
        return page_ids

    def register(self, page_id: int, key: PageKey) -> int:
        """The held page is full and `key` names its contents; later `find`s will see it.

        If another page has these contents already, the caller is moved to that one: its reference
        goes over, and the page that it brought is given back. Returns the page now held.
        """
        known = self._page_of.get(key)
        if known == page_id:
            return page_id
        if known is not None:
            self.hold((known,))
            self.release((page_id,))
            return known
        if page_id in self._key_of:
            raise AssertionError(f"page {page_id} got a second key")
        self._page_of[key] = page_id
        self._key_of[page_id] = key
        return page_id

    def forget(self, page_ids: Iterable[int]) -> None:
        """What these pages hold is not to be found again: it turned out to be bad."""
        for page_id in page_ids:
            key = self._key_of.pop(page_id, None)
            if key is not None:
                del self._page_of[key]
            if page_id in self._cached:
                del self._cached[page_id]
                self._free.append(page_id)

    def release(self, page_ids: Sequence[int]) -> None:
        """One reference less to each. A page nobody holds is cached if it has a key, else free.

        Pages are given in the order of the sequence and let go from its end: a page is of no use
        without those before it, so the end of a prefix is evicted before its beginning.
        """
        for page_id in reversed(page_ids):
            self._references[page_id] -= 1
            if self._references[page_id]:
                continue
            del self._references[page_id]
            if page_id in self._key_of:
                self._cached[page_id] = None
            else:
                self._free.append(page_id)
