"""Page tables of sequences: which pages a sequence allocates, shares, copies and releases.

This module connects the pool, which knows no sequences, with the scheduler, which knows no page
numbers.

Shared pages, and positions that the pool has registered, are never written. A sequence that must
continue in the middle of such a page gets a copy of the part before. Copies are listed in order and
run before the next pass, so that one plan may copy from a page, reallocate it and write it. A copy
stays listed until its pass is over (`Scheduler.advance`): a plan that never ran loses none.
"""

from __future__ import annotations

from collections.abc import Sequence

from exl_core.cache.format import pages_for
from exl_core.cache.page_pool import PagePool
from exl_core.engine.sequence import SequenceState
from exl_core.model.segment import PageCopy


class Paging:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.copies: list[PageCopy] = []  # not run yet

    def num_wanted(self, sequence: SequenceState, more: int = 0) -> int:
        """Pages that the sequence lacks for its tokens and `more` tokens."""
        return pages_for(len(sequence.token_ids) + more, self.page_size) - len(sequence.page_ids)

    def start(self, members: tuple[SequenceState, ...], *, spare: int) -> bool:
        """Allocate pages for all of these sequences, reusing cached prefixes.

        False, without any change, unless `spare` pages remain available afterwards.
        """
        found = [self._known_prefix(sequence) for sequence in members]
        distinct = {page_id for page_ids in found for page_id in page_ids}
        wanted = [
            self.num_wanted(sequence) - len(page_ids)
            for sequence, page_ids in zip(members, found, strict=True)
        ]
        taken = len(distinct) - self.pool.num_held_among(distinct) + sum(wanted)
        if taken + spare > self.pool.num_available:
            return False
        for page_ids in found:
            self.pool.hold(page_ids)  # before allocating, which may evict cached pages
        for sequence, page_ids, count in zip(members, found, wanted, strict=True):
            self._start(sequence, page_ids, count)
        return True

    def extend(self, sequence: SequenceState, count: int) -> bool:
        """Allocate `count` more pages; False if the pool has fewer."""
        page_ids = self.pool.allocate(count)
        if page_ids is None:
            return False
        sequence.page_ids += page_ids
        return True

    def trim(self, sequence: SequenceState) -> None:
        """Release pages behind the last token."""
        keep = pages_for(len(sequence.token_ids), self.page_size)
        self.pool.release(sequence.page_ids[keep:])
        del sequence.page_ids[keep:]

    def release(self, sequence: SequenceState, *, is_trusted: bool = True) -> None:
        """Release all pages. Their contents can be reused later if `is_trusted`."""
        if is_trusted:
            self.note(sequence)
        else:
            self.pool.forget(sequence.page_ids)
        self.pool.release(sequence.page_ids)
        sequence.page_ids, sequence.past_len = [], 0

    def register(self, sequence: SequenceState, first_page: int) -> None:
        """Register the full pages from `first_page` on for prefix sharing."""
        for i in range(first_page, sequence.past_len // self.page_size):
            contents = sequence.contents(i, self.page_size, self.page_size)
            sequence.page_ids[i] = self.pool.register(sequence.page_ids[i], contents)

    def note(self, sequence: SequenceState) -> None:
        """Register the tokens on the last, partly filled page, so that others can copy them."""
        page, length = divmod(sequence.past_len, self.page_size)
        if length:
            contents = sequence.contents(page, length, self.page_size)
            self.pool.note(sequence.page_ids[page], contents)

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Cut the sequence to `length` tokens. The last of them will be computed again."""
        sequence.cut(length, self.page_size)
        self.trim(sequence)
        sequence.past_len = min(sequence.past_len, length - 1)
        page, offset = divmod(sequence.past_len, self.page_size)
        if page >= len(sequence.page_ids):
            return
        page_id = sequence.page_ids[page]
        if not self.pool.is_shared(page_id):
            self.pool.forget((page_id,))
            return
        fresh = self.pool.allocate(1)
        if fresh is None:  # recompute from the start of the page once a page is free
            self.pool.release(sequence.page_ids[page:])
            del sequence.page_ids[page:]
            sequence.past_len = page * self.page_size
            return
        sequence.page_ids[page] = fresh[0]
        self._copy(page_id, fresh[0], offset)
        self.pool.release((page_id,))

    def drop_copies(self) -> None:
        """Drop copies that no pass needs any more, and forget the contents of their targets."""
        self.pool.forget(copy.target for copy in self.copies)
        self.copies.clear()

    def _known_prefix(self, sequence: SequenceState) -> Sequence[int]:
        num_full = sequence.reusable_len // self.page_size
        return self.pool.find(sequence.extend_keys(num_full, self.page_size))

    def _start(self, sequence: SequenceState, found: Sequence[int], count: int) -> None:
        start = len(found) * self.page_size
        end = min(start + self.page_size, sequence.reusable_len)
        previous = sequence.key_before(len(found), self.page_size)
        run = self.pool.find_run(previous, sequence.token_ids[start:end])
        fresh = self.pool.allocate(count)
        assert fresh, "the pages were counted before; the last token always needs one"
        sequence.page_ids = [*found, *fresh]
        sequence.past_len = start
        if run is not None:
            self._copy(run.page_id, fresh[0], run.length)
            sequence.past_len += run.length
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.past_len
            sequence.cached_pages = len(found)

    def _copy(self, source: int, target: int, length: int) -> None:
        # The pool may have allocated the source page itself: then no copy is needed.
        if length and source != target:
            self.copies.append(PageCopy(source, target, length))
