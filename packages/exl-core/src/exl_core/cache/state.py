"""Slots of recurrent state: which sequence or snapshot has each, and which snapshot is given up.

A state is what the recurrent layers keep of a sequence, whatever its length. It belongs to one
length exactly: unlike keys and values, it has no part that a shorter or another text could use. A
running sequence has a slot that each pass changes. Snapshots are copies of it, at page borders or
at the end of a sequence, and let a later sequence with the same beginning, or the same one after
going back, continue from there.

This module does the bookkeeping only: it knows slots and token ids, and neither tensors
(`state_store.py`) nor pages. `PagePool` reports page contents that it discards, and the snapshots
that need them go too.

Invariants, checked after every call in the property tests:
  * a slot is free, lent to a sequence, or has a snapshot, and exactly one of them;
  * a snapshot's tokens after the page before it are fewer than a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from exl_core.cache.page_pool import PageKey

SPARE_SLOTS = 1
"""Slots of a layer on a GPU beside those of the pool. Padding rows of a batch write there."""


class StateCopy(NamedTuple):
    """Copies the state in slot `source` to slot `target`, in every layer."""

    source: int
    target: int


class StateKey(NamedTuple):
    """The prefix that a snapshot is of: the key of its full pages, and the tokens after them."""

    pages: PageKey
    rest: tuple[int, ...] = ()


class StateStats(NamedTuple):
    """Counts since the pool was created: snapshots taken, used, and given up for another state."""

    saved: int = 0
    used: int = 0
    evicted: int = 0


def default_snapshots(kv_bytes: int, state_bytes: int, num_pages: int, max_batch: int) -> int:
    """Snapshots that take the memory of a cache of `kv_bytes`, at least one for each sequence of a
    batch, and at most one for each page; 0 if the model has no states."""
    if not state_bytes:
        return 0
    return min(num_pages, max(max_batch, kv_bytes // state_bytes))


class StatePool:
    """Lends slots to sequences, and keeps snapshots in the others."""

    def __init__(self, num_slots: int, num_sequences: int) -> None:
        """`num_sequences`: sequences that have a slot at the same time, at most."""
        if num_slots < num_sequences:
            raise AssertionError(f"{num_slots} slots of state for {num_sequences} sequences")
        self.num_slots = num_slots
        self._max_backups = num_slots - num_sequences
        self._num_saved = self._num_used = self._num_evicted = 0
        self.reset()

    def reset(self) -> None:
        """Makes every slot free. No sequence may use its slot afterwards."""
        self._free = list(range(self.num_slots - 1, -1, -1))  # the lowest number goes out first
        self._lent: set[int] = set()
        self._backups: set[int] = set()
        self._slot_of: OrderedDict[StateKey, int] = OrderedDict()  # least recently used first
        self._after: dict[PageKey, dict[StateKey, None]] = {}

    @property
    def lent_slots(self) -> frozenset[int]:
        return frozenset(self._lent)

    @property
    def free_slots(self) -> frozenset[int]:
        return frozenset(self._free)

    @property
    def num_available(self) -> int:
        """Slots that are free or have a snapshot."""
        return len(self._free) + len(self._slot_of)

    @property
    def snapshots(self) -> Mapping[StateKey, int]:
        """Slots by prefix, in order of eviction."""
        return MappingProxyType(self._slot_of)

    @property
    def stats(self) -> StateStats:
        return StateStats(self._num_saved, self._num_used, self._num_evicted)

    def lend(self) -> int | None:
        """A slot of unknown contents: a free one, or that of the least recently used snapshot. None
        if all are lent."""
        if not self._free and not self._slot_of:
            return None
        if not self._free:
            self._drop(next(iter(self._slot_of)))
            self._num_evicted += 1
        slot = self._free.pop()
        self._lent.add(slot)
        return slot

    def lend_backup(self) -> int | None:
        """A second slot for a sequence, like `lend`. None if another sequence may need the slot."""
        slot = self.lend() if len(self._backups) < self._max_backups else None
        if slot is not None:
            self._backups.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Makes a lent slot free."""
        self._lent.remove(slot)
        self._backups.discard(slot)
        self._free.append(slot)

    def keep(self, key: StateKey, slot: int) -> None:
        """Turns a lent slot into the snapshot of a prefix. A snapshot of the same prefix stays, and
        the slot becomes free."""
        if key in self._slot_of:
            self.touch(key)
            self.give_back(slot)
            return
        self._lent.remove(slot)
        self._slot_of[key] = slot
        self._after.setdefault(key.pages, {})[key] = None
        self._num_saved += 1

    def has(self, key: StateKey) -> bool:
        return key in self._slot_of

    def longest(self, pages: PageKey, token_ids: Sequence[int]) -> StateKey | None:
        """The snapshot of the longest prefix of these pages and tokens that has all the pages. None
        if there is none."""
        wanted = tuple(token_ids)
        fitting = (key for key in self._after.get(pages, ()) if wanted[: len(key.rest)] == key.rest)
        return max(fitting, key=lambda key: len(key.rest), default=None)

    def touch(self, key: StateKey) -> None:
        """Makes a snapshot the most recently used one."""
        self._slot_of.move_to_end(key)

    def use(self, key: StateKey) -> int:
        """Slot of a snapshot, which becomes the most recently used one."""
        self.touch(key)
        self._num_used += 1
        return self._slot_of[key]

    def drop_after(self, pages: PageKey) -> None:
        """Drops the snapshots of prefixes with exactly these full pages."""
        for key in list(self._after.get(pages, ())):
            self._drop(key)

    def drop_partial(self, pages: PageKey, known: Iterable[Sequence[int]]) -> None:
        """Drops the snapshots after these pages whose further tokens are not the beginning of any
        of the `known` contents of the next page."""
        contents = [tuple(ids) for ids in known]
        for key in list(self._after.get(pages, ())):
            size = len(key.rest)
            if size and not any(ids[:size] == key.rest for ids in contents):
                self._drop(key)

    def drop(self, snapshots: Iterable[tuple[StateKey, int]]) -> None:
        """Drops these snapshots, if they are still in these slots."""
        for key, slot in snapshots:
            if self._slot_of.get(key) == slot:
                self._drop(key)

    def drop_slots(self, slots: Iterable[int]) -> None:
        """Drops the snapshots in these slots, whose contents are invalid."""
        invalid = set(slots)
        for key in [key for key, slot in self._slot_of.items() if slot in invalid]:
            self._drop(key)

    def _drop(self, key: StateKey) -> None:
        self._free.append(self._slot_of.pop(key))
        siblings = self._after[key.pages]
        del siblings[key]
        if not siblings:
            del self._after[key.pages]
