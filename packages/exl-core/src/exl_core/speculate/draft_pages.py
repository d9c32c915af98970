"""What each page of a draft model's cache holds. Ids and keys, no tensors.

The draft's cache has the page numbers of the model's own cache, but it is filled later and less: a
page that the engine handed to another request still holds the old one's tokens here, and drafted
tokens that were rejected stand behind those that stayed. So every page remembers which tokens were
written to it, and after which prefix; what a sequence may use of its pages is found by comparing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from exl_core.cache.format import PAGE_SIZE
from exl_core.cache.page_pool import NO_KEY, PageKey, page_key


@dataclass(slots=True)
class _Page:
    """`before`: key of the page before; None where it was full of tokens still in doubt."""

    before: PageKey | None = None
    token_ids: list[int] = field(default_factory=list)
    key: PageKey | None = None


class DraftPages:
    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        self._pages = [_Page() for _ in range(num_pages)]
        self._page_size = page_size

    def clear(self) -> None:
        """What the pages hold is not known any more."""
        self._pages = [_Page() for _ in self._pages]

    def keys_of(self, token_ids: Sequence[int], known: Sequence[PageKey]) -> list[PageKey]:
        """Keys of all full pages, those that were not told included."""
        size = self._page_size
        keys = list(known[: len(token_ids) // size])
        for start in range(len(keys) * size, len(token_ids) - size + 1, size):
            before = keys[-1] if keys else NO_KEY
            keys.append(page_key(before, token_ids[start : start + size]))
        return keys

    def num_cached(
        self, token_ids: Sequence[int], page_ids: Sequence[int], keys: Sequence[PageKey]
    ) -> int:
        """How many tokens from the start on can be used. `keys` are those of all full pages."""
        size = self._page_size
        for index, page_id in enumerate(page_ids):
            page = self._pages[page_id]
            if index < len(keys) and page.key == keys[index]:
                continue
            start = index * size
            if page.before != _key_before(index, keys):
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
    ) -> None:
        """The pages of a sequence hold these tokens from position `start` on, and none behind."""
        size, done = self._page_size, 0
        while done < len(token_ids):
            index, offset = divmod(start + done, size)
            page = self._pages[page_ids[index]]
            new = token_ids[done : done + size - offset]
            page.before = _key_before(index, keys)
            page.token_ids[offset:] = new
            is_known = len(page.token_ids) == size and index < len(keys)
            page.key = keys[index] if is_known else None
            done += len(new)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        """All at once. A page that is only moved away from is left empty."""
        moved = [(target, self._pages[source]) for source, target in moves]
        for source, _ in moves:
            self._pages[source] = _Page()
        for target, page in moved:
            self._pages[target] = page


def _key_before(index: int, keys: Sequence[PageKey]) -> PageKey | None:
    """The first page has the same beginning for all: its tokens alone say what it holds."""
    if index == 0:
        return NO_KEY
    return keys[index - 1] if index <= len(keys) else None


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = min(len(left), len(right))
    if list(left[:count]) == list(right[:count]):
        return count
    return next(i for i in range(count) if left[i] != right[i])
