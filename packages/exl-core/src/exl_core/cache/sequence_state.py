"""Memory of one sequence: the pages of its keys and values, and its recurrent state.

`SequenceState` owns it and changes it by four operations:

  * `share`    start on the pages of a known prefix, which other sequences may hold too;
  * `extend`   get memory for more tokens;
  * `rewind`   drop the last tokens;
  * `release`  give up all memory; what it contains may be reused.

`advance` records what a pass has computed. The scheduler, which calls these, sees page numbers only
when it lays out a pass.

If the model has recurrent layers, a sequence also has a slot with their state after `past_len`
tokens (`cache/state.py`). `share` starts from a snapshot, `advance` takes one at every page border
where a pass ends, `rewind` returns to the last one, and `release` leaves the state as a snapshot. A
state cannot be cut: going back means computing again from a snapshot, so `past_len` may become less
than was asked for. `protect` keeps the state before a draft, of which a part may be rejected.

A pass that was launched before its tokens were known (`launch`) moves the state one token beyond
`past_len`, to the end of `token_ids`. The next `advance` accepts it. A sequence that ends instead
is released with that state and the values of its newest token: both are of its own text.

Shared pages, and positions that the pool has registered, are never written. A sequence that must
continue in the middle of such a page gets a copy of the part before. Copies are listed in order and
run before the next pass, so that one plan may copy from a page, reallocate it and write it. A copy
stays listed until its pass is over: a plan that never ran loses none.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import pairwise

from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_core.cache.page_pool import (
    MIN_RUN,
    NO_KEY,
    PageContents,
    PageCopy,
    PageKey,
    PagePool,
    page_key,
)
from exl_core.cache.state import StateCopy, StateKey, StatePool

UNKNOWN_LEN = sys.maxsize
"""Length of a state that is of no known text: larger than any other length."""


class CacheMemory:
    """Memory that the sequences of one engine share: pages, slots of recurrent state if the model
    has some, and copies that have not run yet."""

    def __init__(
        self, pool: PagePool, page_size: int = PAGE_SIZE, states: StatePool | None = None
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.states = states
        self.copies: list[PageCopy] = []
        self.state_copies: list[StateCopy] = []
        if states is not None:
            pool.on_discard = self._discarded

    def copy(self, source: int, target: int, length: int) -> None:
        """List a copy of the first `length` positions."""
        # The pool may have allocated the source page itself: then no copy is needed.
        if length and source != target:
            self.copies.append(PageCopy(source, target, length))

    def drop_copies(self) -> None:
        """Drop copies that no pass needs any more, and forget the contents of their targets."""
        self.pool.forget(copy.target for copy in self.copies)
        self.copies.clear()
        self.drop_state_copies()

    def drop_state_copies(self) -> None:
        """Drop copies of states, and the snapshots that they were to fill."""
        if self.states is not None:
            self.states.drop_slots(copy.target for copy in self.state_copies)
        self.state_copies.clear()

    def reset(self) -> None:
        """Make all memory free, after a pass that raised. Each sequence must `forget` its own."""
        self.copies.clear()
        self.state_copies.clear()
        self.pool.reset()
        if self.states is not None:
            self.states.reset()

    def _discarded(self, contents: PageContents) -> None:
        """Drop the snapshots that need contents which the pool has discarded."""
        assert self.states is not None, "only then the pool reports"
        self.states.drop_after(contents.key)
        known = (other.token_ids for other in self.pool.known_after(contents.previous))
        self.states.drop_partial(contents.previous, known)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Known beginning of a sequence: full pages, and the snapshot of the state after
    its end. The snapshot may include tokens of the next page, which `extend` copies."""

    page_ids: tuple[int, ...] = ()
    snapshot: StateKey | None = None


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
    slot: int | None = None
    """Slot of the state after `past_len` tokens, if the model has one and the sequence runs."""
    _state_len: int = 0
    """Tokens that the state in `slot` is after, pending copies included: `past_len`, or more after
    `launch`, or `UNKNOWN_LEN`."""
    _copy_end: int = 0
    """End of the tokens that `extend` may copy from a known page. Set by `share`; 0 after that."""
    _backup: tuple[int, int] | None = None
    """Slot with the state after fewer tokens, and their number."""
    _written: set[int] = field(default_factory=set)
    """Pages of `page_ids` that this sequence has written, or will write. It found the others."""
    _saved: list[tuple[StateKey, int]] = field(default_factory=list)
    """Snapshots that this sequence has taken at page borders, with their slots."""

    @property
    def capacity(self) -> int:
        """Tokens beyond the last one that fit the memory; negative if the last one does not."""
        return len(self.page_ids) * self.memory.page_size - len(self.token_ids)

    @property
    def is_ahead(self) -> bool:
        """The state is not that after `past_len` tokens, which a pass would start from."""
        return self.slot is not None and self._state_len != self.past_len

    @property
    def num_jumps(self) -> int:
        """Pages that do not directly follow the previous page in memory."""
        return sum(page != before + 1 for before, page in pairwise(self.page_ids))

    def num_wanted(self, more: int = 0) -> int:
        """Pages that are missing for the tokens and `more` tokens."""
        size = self.memory.page_size
        return pages_for(len(self.token_ids) + more, size) - len(self.page_ids)

    def known_prefix(self, reusable_len: int, *, allow_partial: bool = True) -> Prefix:
        """The longest known prefix of at most `reusable_len` tokens: its full pages, and with
        recurrent layers a snapshot after its end.

        `allow_partial` False: no snapshot within a page. The known page, from which `extend` must
        copy, may be evicted if another sequence gets pages before.
        """
        size, states = self.memory.page_size, self.memory.states
        page_ids = self.memory.pool.find(self._keys_of(reusable_len // size))
        if states is None:
            return Prefix(tuple(page_ids))
        for count in range(len(page_ids), -1, -1):
            rest = self.token_ids[count * size : min((count + 1) * size, reusable_len)]
            previous = self._key_before(count)
            known = states.longest(previous, rest if allow_partial else ())
            if known is not None and not self._is_known(known):
                known = states.longest(previous, ())
            if known is not None:
                return Prefix(tuple(page_ids[:count]), known)
        return Prefix()

    def share(self, prefix: Prefix, reusable_len: int) -> None:
        """Start on this prefix, the result of `known_prefix`.

        The first `extend` copies what is known of the next page, up to `reusable_len` tokens, or
        with recurrent layers up to the snapshot.
        """
        page_ids, states = prefix.page_ids, self.memory.states
        self.memory.pool.hold(page_ids)
        self.page_ids = list(page_ids)
        self.past_len = len(page_ids) * self.memory.page_size
        if states is None:
            self._copy_end = min(self.past_len + self.memory.page_size, reusable_len)
            return
        source = None if prefix.snapshot is None else states.use(prefix.snapshot)
        self.slot, self._state_len = states.lend(), 0  # may evict the snapshot itself
        assert self.slot is not None, "there is a slot for each sequence of a batch"
        if prefix.snapshot is None or source is None:
            return
        self._copy_state(source, self.slot)
        self._state_len = self._copy_end = self.past_len + len(prefix.snapshot.rest)

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
        self._written.update(fresh)
        if run is not None:
            self.memory.copy(run.page_id, fresh[0], run.length)
            self.past_len += run.length
        assert not copy_end or not self.is_ahead, "the part before the state is as it was found"
        return True

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens only. The last of them will be computed again."""
        del self.token_ids[length:]
        del self.keys[length // self.memory.page_size :]
        self._trim()
        self._go_back(min(self.past_len, length - 1))

    def _go_back(self, length: int) -> None:
        """Count only the first `length` tokens as cached, or fewer if no state is known there."""
        pool, size = self.memory.pool, self.memory.page_size
        if self.slot is not None and length < self._state_len:
            length = self._state_len = self._restore(length)
        self.past_len = length
        page, offset = divmod(self.past_len, size)
        if self.slot is not None:  # pages that will be written again may be shared
            self._release_pages(page + 1)
        if page >= len(self.page_ids):
            return
        page_id = self.page_ids[page]
        if not pool.is_shared(page_id):
            pool.forget((page_id,))
            self._written.add(page_id)
            return
        fresh = pool.allocate(1)
        if fresh is None:  # recompute from the start of the page once a page is free
            self._release_pages(page)
            if self.slot is not None and offset:
                self._go_back(page * size)
            self.past_len = min(self.past_len, page * size)
            return
        self.page_ids[page] = fresh[0]
        self._written.add(fresh[0])
        self._written.discard(page_id)
        self.memory.copy(page_id, fresh[0], offset)
        pool.release((page_id,))

    def protect(self) -> None:
        """Keep the state after `past_len` tokens, before a pass of which a part may be rejected."""
        states = self.memory.states
        if states is None or self.slot is None:
            return
        if self._backup is not None and self._backup[1] == self.past_len:
            return
        self._drop_backup()
        slot = states.lend_backup()
        if slot is not None:
            self._copy_state(self.slot, slot)
            self._backup = slot, self.past_len

    def undo(self) -> None:
        """Go back to a known state: that in the slot is invalid, as a pass was interrupted."""
        if self.slot is not None and self.past_len:
            self._drop_backup()  # its copy may not have run either
            self._state_len = UNKNOWN_LEN
            self._go_back(self.past_len)

    def launch(self, count: int) -> None:
        """Record that the next two passes have been launched: one of `count` tokens, which will
        `advance`, and one of the token after them. Only states depend on it."""
        self._state_len = self.past_len + count + 1

    def lose_state(self) -> None:
        """Record that the state includes unknown tokens. The next `advance` goes back."""
        self._state_len = UNKNOWN_LEN

    def chunk_end(self, end: int) -> int:
        """End of the next chunk of a prompt, which would end at `end` otherwise. With recurrent
        layers chunks end at page borders, where `advance` takes snapshots."""
        if self.slot is None:
            return end
        size = self.memory.page_size
        border = min(end, len(self.token_ids) - 1) // size * size
        return border if border > self.past_len else end

    def release(self, *, is_trusted: bool = True) -> None:
        """Give up all memory. Its contents can be reused later if `is_trusted`.

        Pages and snapshots of other sequences can be reused in any case.
        """
        if is_trusted:
            self._accept_launched()
            self._note()
        else:
            self._forget_written()
        self._release_state(is_trusted=is_trusted)
        self.memory.pool.release(self.page_ids)
        self.forget()

    def forget(self) -> None:
        """Have no memory any more, after `CacheMemory.reset`."""
        self.page_ids, self.past_len, self._copy_end, self._state_len = [], 0, 0, 0
        self.slot = self._backup = None
        self._written.clear()
        self._saved.clear()

    def _forget_written(self) -> None:
        """Forget the contents of the pages and snapshots that this sequence has written."""
        self.memory.pool.forget(page for page in self.page_ids if page in self._written)
        if self.memory.states is not None:
            self.memory.states.drop(self._saved)

    def advance(self, count: int, *, is_prompt: bool) -> None:
        """Record a pass that computed `count` tokens, drafts included, from `past_len` on.

        Those that are still part of the sequence now count as cached, except the newest one: the
        next pass computes it. Full pages become available for sharing, and after a chunk of a
        prompt (`is_prompt`) so does the last page. Pages behind the last token are released.
        """
        size = self.memory.page_size
        first_page, computed = self.past_len // size, self.past_len + count
        if self.slot is not None:
            self._state_len = max(self._state_len, computed)
            if computed > len(self.token_ids) - 1:
                # The state includes rejected tokens. The next pass repeats the accepted ones.
                self._trim()
                self._go_back(self.past_len)
                return
        self.past_len = min(computed, len(self.token_ids) - 1)
        if self.past_len // size > first_page:
            self._register(first_page)
        if is_prompt:
            self._note()
        self._trim()
        if self.slot is None:
            return
        if self._state_len == UNKNOWN_LEN:
            self._go_back(self.past_len)
        elif self.past_len and self.past_len % size == 0:
            assert not self.is_ahead, "no pass is launched that needs another page"
            self._save_border()

    def _accept_launched(self) -> None:
        """Count the newest token as cached, if a launched pass has computed it."""
        if self.is_ahead and self._state_len == len(self.token_ids):
            first_page = self.past_len // self.memory.page_size
            self.past_len = self._state_len
            self._register(first_page)

    def _register(self, first_page: int) -> None:
        """Make the full pages from this one on available for sharing."""
        size = self.memory.page_size
        for i in range(first_page, self.past_len // size):
            own = self.page_ids[i]
            self.page_ids[i] = self.memory.pool.register(own, self._contents(i, size))
            if self.page_ids[i] != own:
                self._written.discard(own)

    def _save_border(self) -> None:
        """Take a snapshot at the end of the last full page."""
        states, slot = self.memory.states, self.slot
        assert states is not None and slot is not None, "the caller has checked it"
        key = StateKey(self._key_before(self.past_len // self.memory.page_size))
        target = None if states.has(key) or not self._is_known(key) else states.lend()
        if target is not None:
            self._copy_state(slot, target)
            states.keep(key, target)
            self._saved.append((key, target))

    def _restore(self, length: int) -> int:
        """Continue from the longest known state of at most `length` tokens. Returns its length."""
        states, slot = self.memory.states, self.slot
        assert states is not None and slot is not None, "the caller has checked it"
        found, source = 0, None
        for count in range(length // self.memory.page_size, 0, -1):
            key = StateKey(self._key_before(count))
            if states.has(key):
                found, source = count * self.memory.page_size, states.use(key)
                break
        if self._backup is not None:
            backup, held = self._backup
            if found < held <= length:
                found, source = held, backup
            elif held > length:
                self._drop_backup()
        if source is not None:
            self._copy_state(source, slot)
        return found

    def _release_state(self, *, is_trusted: bool) -> None:
        """Leave the state as a snapshot of the whole sequence, if it `is_trusted`."""
        states, slot = self.memory.states, self.slot
        if states is None or slot is None:
            return
        self._drop_backup()
        page, rest = divmod(self.past_len, self.memory.page_size)
        start = page * self.memory.page_size
        key = StateKey(self._key_before(page), tuple(self.token_ids[start : self.past_len]))
        is_valid = is_trusted and not self.is_ahead and self.past_len > 0
        if is_valid and rest not in range(1, MIN_RUN) and self._is_known(key):
            states.keep(key, slot)
        else:
            states.give_back(slot)

    def _drop_backup(self) -> None:
        if self._backup is not None and self.memory.states is not None:
            self.memory.states.give_back(self._backup[0])
        self._backup = None

    def _copy_state(self, source: int, target: int) -> None:
        """List a copy of a state."""
        # The pool may have lent the slot of the snapshot itself: then no copy is needed.
        if source != target:
            self.memory.state_copies.append(StateCopy(source, target))

    def _is_known(self, key: StateKey) -> bool:
        """Whether a snapshot's last full page is known, and a page with the tokens after it."""
        pool, size = self.memory.pool, len(key.rest)
        if not size:
            return bool(pool.find((key.pages,)))
        return any(known.token_ids[:size] == key.rest for known in pool.known_after(key.pages))

    def _note(self) -> None:
        """Register the tokens on the last, partly filled page, so that others can copy them."""
        page, length = divmod(self.past_len, self.memory.page_size)
        if length:
            self.memory.pool.note(self.page_ids[page], self._contents(page, length))

    def _trim(self) -> None:
        """Release pages behind the last token."""
        self._release_pages(pages_for(len(self.token_ids), self.memory.page_size))

    def _release_pages(self, first_page: int) -> None:
        """Release the pages from this one on."""
        released = self.page_ids[first_page:]
        self.memory.pool.release(released)
        self._written.difference_update(released)
        del self.page_ids[first_page:]

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
