"""Contents of the pages of a draft model's cache, as ids and keys without tensors.

The draft cache uses the page numbers of the target model's cache but is filled later and less. A
page that the engine gave to another request still holds the previous request's tokens here, and
rejected draft tokens follow the accepted ones. Every page therefore records which tokens were
written to it and after which prefix. Comparison shows how much of its pages a sequence can use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from exl_core.cache.format import PAGE_SIZE
from exl_core.cache.page_pool import NO_KEY, PageKey, page_key


@dataclass(slots=True)
class _Page:
    """Recorded content of one page.

    `before`: key of the previous page; None where that page held unverified tokens.
    """

    before: PageKey | None = None
    token_ids: list[int] = field(default_factory=list)
    key: PageKey | None = None


class DraftPages:
    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        self._pages = [_Page() for _ in range(num_pages)]
        self._page_size = page_size

    def clear(self) -> None:
        """Forget the contents of all pages."""
        self._pages = [_Page() for _ in self._pages]

    def keys_of(
        self, token_ids: Sequence[int], known: Sequence[PageKey], root: PageKey = NO_KEY
    ) -> list[PageKey]:
        """Keys of all full pages after `root`; `known` holds the first ones, the others are
        computed."""
        size = self._page_size
        keys = list(known[: len(token_ids) // size])
        for start in range(len(keys) * size, len(token_ids) - size + 1, size):
            before = keys[-1] if keys else root
            keys.append(page_key(before, token_ids[start : start + size]))
        return keys

    def num_cached(
        self,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        keys: Sequence[PageKey],
        root: PageKey = NO_KEY,
    ) -> int:
        """Number of leading tokens with valid cache entries. `keys`: keys of all full pages, which
        come after `root`."""
        size = self._page_size
        for index, page_id in enumerate(page_ids):
            page = self._pages[page_id]
            if index < len(keys) and page.key == keys[index]:
                continue
            start = index * size
            if page.before != _key_before(index, keys, root):
                return start
            count = _common(page.token_ids, token_ids[start : start + size])
            if count < size:
                return start + count
            if index < len(keys):
                page.key = keys[index]
        return min(len(page_ids) * size, len(token_ids))

    def write(
        self,
        start: int,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        keys: Sequence[PageKey],
        root: PageKey = NO_KEY,
    ) -> None:
        """Record that the pages hold these tokens from position `start` on, and none after them."""
        size, done = self._page_size, 0
        while done < len(token_ids):
            index, offset = divmod(start + done, size)
            page = self._pages[page_ids[index]]
            new = token_ids[done : done + size - offset]
            page.before = _key_before(index, keys, root)
            page.token_ids[offset:] = new
            is_known = len(page.token_ids) == size and index < len(keys)
            page.key = keys[index] if is_known else None
            done += len(new)

    def drop(self, start: int, page_ids: Sequence[int]) -> None:
        """Record that the pages hold no tokens from position `start` on."""
        index, offset = divmod(start, self._page_size)
        for page_id in page_ids[index:]:
            page = self._pages[page_id]
            del page.token_ids[offset:]
            page.key = None
            offset = 0

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        """Apply moves that take effect at once. A page that is only a source becomes empty."""
        moved = [(target, self._pages[source]) for source, target in moves]
        for source, _ in moves:
            self._pages[source] = _Page()
        for target, page in moved:
            self._pages[target] = page


def _key_before(index: int, keys: Sequence[PageKey], root: PageKey) -> PageKey | None:
    """Key of the page before `index`. The first page has no prefix but `root`."""
    if index == 0:
        return root
    return keys[index - 1] if index <= len(keys) else None


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = min(len(left), len(right))
    if list(left[:count]) == list(right[:count]):
        return count
    return next(i for i in range(count) if left[i] != right[i])
