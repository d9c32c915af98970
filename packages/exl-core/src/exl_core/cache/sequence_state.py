"""Memory of one sequence: the pages that hold the keys and values of its tokens.

`SequenceState` owns it and changes it by four operations:

  * `share`    start on the pages of a known prefix, which other sequences may hold too;
  * `extend`   get memory for more tokens;
  * `rewind`   drop the last tokens;
  * `release`  give up all memory; what it contains may be reused.

`advance` records what a pass has computed. The scheduler, which calls these, sees page numbers only
when it lays out a pass.

Recurrent layers will add a state of fixed size, with snapshots at page borders, as a second field
beside the pages. The operations cover it: `share` loads the snapshot after the last shared page,
`advance` takes one at every page border, `rewind` returns to the last one, and `release` gives up
all. Callers are ready for this, because `rewind` may already leave fewer tokens cached than were
asked for.

Shared pages, and positions that the pool has registered, are never written. A sequence that must
continue in the middle of such a page gets a copy of the part before. Copies are listed in order and
run before the next pass, so that one plan may copy from a page, reallocate it and write it. A copy
stays listed until its pass is over: a plan that never ran loses none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_core.cache.page_pool import (
    NO_KEY,
    PageContents,
    PageCopy,
    PageKey,
    PagePool,
    page_key,
)


class CacheMemory:
    """Memory that the sequences of one engine share: pages, and copies that have not run yet."""

    def __init__(self, pool: PagePool, page_size: int = PAGE_SIZE) -> None:
        self.pool = pool
        self.page_size = page_size
        self.copies: list[PageCopy] = []

    def copy(self, source: int, target: int, length: int) -> None:
        """List a copy of the first `length` positions."""
        # The pool may have allocated the source page itself: then no copy is needed.
        if length and source != target:
            self.copies.append(PageCopy(source, target, length))

    def drop_copies(self) -> None:
        """Drop copies that no pass needs any more, and forget the contents of their targets."""
        self.pool.forget(copy.target for copy in self.copies)
        self.copies.clear()

    def reset(self) -> None:
        """Make all memory free, after a pass that raised. Each sequence must `forget` its own."""
        self.copies.clear()
        self.pool.reset()


@dataclass(slots=True, eq=False)
class SequenceState:
    """Tokens of one sequence and their place in memory.

    Tokens `[0, past_len)` are cached, on the pages `page_ids`. A sequence that waits has neither.
    The engine appends to `token_ids`; only `rewind` removes tokens. `key_root` precedes the key of
    the first page: sequences with different roots share no pages.
    """

    memory: CacheMemory
    token_ids: list[int]
    key_root: PageKey = NO_KEY
    past_len: int = 0
    page_ids: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    """Keys of the full pages of `token_ids`, computed on demand."""
    _copy_end: int = 0
    """End of the tokens that `extend` may copy from a known page. Set by `share`; 0 after that."""

    @property
    def capacity(self) -> int:
        """Tokens beyond the last one that fit the memory; negative if the last one does not."""
        return len(self.page_ids) * self.memory.page_size - len(self.token_ids)

    @property
    def num_jumps(self) -> int:
        """Pages that do not directly follow the previous page in memory."""
        return sum(page != before + 1 for before, page in pairwise(self.page_ids))

    def num_wanted(self, more: int = 0) -> int:
        """Pages that are missing for the tokens and `more` tokens."""
        size = self.memory.page_size
        return pages_for(len(self.token_ids) + more, size) - len(self.page_ids)

    def known_prefix(self, reusable_len: int) -> list[int]:
        """Pages of the longest known prefix, of at most `reusable_len` tokens."""
        return self.memory.pool.find(self._keys_of(reusable_len // self.memory.page_size))

    def share(self, page_ids: Sequence[int], reusable_len: int) -> None:
        """Start on these pages, the result of `known_prefix`.

        The first `extend` copies what is known of the next page, up to `reusable_len` tokens.
        """
        self.memory.pool.hold(page_ids)
        self.page_ids = list(page_ids)
        self.past_len = len(page_ids) * self.memory.page_size
        self._copy_end = min(self.past_len + self.memory.page_size, reusable_len)

    def extend(self, count: int) -> bool:
        """Get `count` more pages; False, without any change, if fewer are available."""
        pool, run = self.memory.pool, None
        if count > pool.num_available:
            return False
        copy_end, self._copy_end = self._copy_end, 0
        if copy_end > self.past_len:
            previous = self._key_before(len(self.page_ids))
            run = pool.find_run(previous, self.token_ids[self.past_len : copy_end])
        fresh = pool.allocate(count)
        assert fresh is not None, "the available pages were counted"
        self.page_ids += fresh
        if run is not None:
            self.memory.copy(run.page_id, fresh[0], run.length)
            self.past_len += run.length
        return True

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens only. The last of them will be computed again."""
        pool, size = self.memory.pool, self.memory.page_size
        del self.token_ids[length:]
        del self.keys[length // size :]
        self._trim()
        self.past_len = min(self.past_len, length - 1)
        page, offset = divmod(self.past_len, size)
        if page >= len(self.page_ids):
            return
        page_id = self.page_ids[page]
        if not pool.is_shared(page_id):
            pool.forget((page_id,))
            return
        fresh = pool.allocate(1)
        if fresh is None:  # recompute from the start of the page once a page is free
            pool.release(self.page_ids[page:])
            del self.page_ids[page:]
            self.past_len = page * size
            return
        self.page_ids[page] = fresh[0]
        self.memory.copy(page_id, fresh[0], offset)
        pool.release((page_id,))

    def release(self, *, is_trusted: bool = True) -> None:
        """Give up all memory. Its contents can be reused later if `is_trusted`."""
        if is_trusted:
            self._note()
        else:
            self.memory.pool.forget(self.page_ids)
        self.memory.pool.release(self.page_ids)
        self.forget()

    def forget(self) -> None:
        """Have no memory any more, after `CacheMemory.reset`."""
        self.page_ids, self.past_len, self._copy_end = [], 0, 0

    def advance(self, count: int, *, is_prompt: bool) -> None:
        """Record a pass that computed `count` tokens, drafts included, from `past_len` on.

        Those that are still part of the sequence now count as cached, except the newest one: the
        next pass computes it. Full pages become available for sharing, and after a chunk of a
        prompt (`is_prompt`) so does the last page. Pages behind the last token are released.
        """
        size = self.memory.page_size
        first_page = self.past_len // size
        self.past_len = min(self.past_len + count, len(self.token_ids) - 1)
        for i in range(first_page, self.past_len // size):
            self.page_ids[i] = self.memory.pool.register(self.page_ids[i], self._contents(i, size))
        if is_prompt:
            self._note()
        self._trim()

    def _note(self) -> None:
        """Register the tokens on the last, partly filled page, so that others can copy them."""
        page, length = divmod(self.past_len, self.memory.page_size)
        if length:
            self.memory.pool.note(self.page_ids[page], self._contents(page, length))

    def _trim(self) -> None:
        """Release pages behind the last token."""
        keep = pages_for(len(self.token_ids), self.memory.page_size)
        self.memory.pool.release(self.page_ids[keep:])
        del self.page_ids[keep:]

    def _keys_of(self, num_pages: int) -> list[PageKey]:
        """Keys of the first `num_pages` pages, which must be full."""
        size = self.memory.page_size
        while len(self.keys) < num_pages:
            start = len(self.keys) * size
            previous = self.keys[-1] if self.keys else self.key_root
            self.keys.append(page_key(previous, self.token_ids[start : start + size]))
        return self.keys[:num_pages]

    def _key_before(self, page: int) -> PageKey:
        """Key of everything before this page."""
        return self._keys_of(page)[-1] if page else self.key_root

    def _contents(self, page: int, length: int) -> PageContents:
        """Contents of the first `length` positions of this page."""
        size = self.memory.page_size
        token_ids = tuple(self.token_ids[page * size : page * size + length])
        previous = self._key_before(page)
        if length == size:
            return PageContents(previous, token_ids, self._keys_of(page + 1)[page])
        return PageContents.of(previous, token_ids)
