"""Caches of the old kind: a fixed number of rows and columns, used by one owner at a time.

The memory is a store of exl that engines and contexts share. Generators and `model.forward` take
turns: when another owner takes the cache, the contents of the former one are dropped, except that
`forward` continues a stream by computing its tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.store import KVStore
from exl_core.model.runner import store_for
from exl_exllamav2.errors import OldAssertionError, OldValueError, old_types, refuse
from exl_exllamav2.notices import warn_once

if TYPE_CHECKING:
    from exl_exllamav2.model import ExLlamaV2


class Owner(Protocol):
    """Current user of a cache."""

    @property
    def held_len(self) -> int:
        """Columns in the cache."""
        ...

    def held_ids(self) -> list[list[int]]:
        """Tokens in the cache, by row, without padding."""
        ...

    def leave(self) -> None:
        """Stop all work on the cache, because another owner takes it."""
        ...


class ExLlamaV2CacheBase:
    """Common base of all caches. `max_seq_len` -1 takes the model's."""

    kv_format = KVFormat.FP16
    wbits: int | None = None

    def __init__(
        self,
        model: ExLlamaV2,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: ExLlamaV2CacheBase | None = None,
        lazy: bool = False,
        num_key_value_heads: int | None = None,
        fixed_device: Any = None,
    ) -> None:
        if lazy and copy_from is not None:
            raise OldAssertionError("a lazy cache cannot copy another one")
        heads = model.config.num_key_value_heads
        if num_key_value_heads not in (None, heads):
            warn_once("num_key_value_heads", f"is the model's own, {heads}")
        self.model = model
        self.batch_size = batch_size
        length = model.config.max_seq_len if max_seq_len == -1 else max_seq_len
        if length < 1 or batch_size < 1:
            raise OldValueError("a cache needs a row and a column", got=f"{batch_size} x {length}")
        self.max_seq_len = length
        self.owner: Owner | None = None
        self.pending_ids: list[list[int]] | None = None
        """Tokens by row that count as cached, and that the next owner must compute first."""
        self._store: KVStore | None = None
        if copy_from is not None:
            self._copy(copy_from)
        elif not lazy and model.loaded:
            self.allocate()

    @property
    def store(self) -> KVStore:
        """Memory of the cache; allocated at its first use, at the latest."""
        if self._store is None:
            with old_types():
                pages = self.batch_size * pages_for(self.max_seq_len)
                self._store = store_for(self.model.weights, self.kv_format, pages)
        return self._store

    def allocate(self) -> None:
        """Allocate the memory now."""
        _ = self.store

    @property
    def num_tokens(self) -> int:
        """Tokens that all rows together can hold."""
        return self.batch_size * pages_for(self.max_seq_len) * PAGE_SIZE

    def take(self, owner: Owner) -> bool:
        """Make `owner` the user of the cache. True if it was not: its own contents are lost."""
        if self.owner is owner:
            return False
        if self.owner is not None:
            self.owner.leave()
        self.owner = owner
        return True

    @property
    def current_seq_len(self) -> int:
        """Columns in use. Assigning a smaller number drops the later ones."""
        if self.pending_ids is not None:
            return max(map(len, self.pending_ids), default=0)
        return 0 if self.owner is None else self.owner.held_len

    @current_seq_len.setter
    def current_seq_len(self, length: int) -> None:
        held = self.current_seq_len
        if not 0 <= length <= held:
            raise OldValueError(
                "current_seq_len can only be cut back", expected=f"0 to {held}", got=length
            )
        if length == held:
            return
        cut = getattr(self.owner, "cut", None)
        if cut is not None and self.pending_ids is None:
            cut(length)
            return
        ids = self.pending_ids
        if ids is None:
            ids = [] if self.owner is None else self.owner.held_ids()
        self.pending_ids = [row[:length] for row in ids]

    def reset(self) -> None:
        self.current_seq_len = 0

    def clone(self) -> ExLlamaV2CacheBase:
        """A new cache of the same class and size with a copy of the contents."""
        return type(self)(self.model, self.batch_size, self.max_seq_len, copy_from=self)

    def _copy(self, other: ExLlamaV2CacheBase) -> None:
        if other.num_tokens != self.num_tokens or other.kv_format is not self.kv_format:
            raise OldAssertionError("the caches differ in size or precision")
        owner = other.owner
        ids = other.pending_ids if owner is None else owner.held_ids()
        self.pending_ids = None if ids is None else [list(row) for row in ids]

    def copy_states(
        self,
        target: ExLlamaV2CacheBase,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        from_row: int,
        from_rows: int,
        to_row: int,
        to_rows: int,
    ) -> None:
        """Copy the beginning of one row to rows of `target`, which computes the tokens again."""
        if from_rows != 1 or from_columns != to_columns:
            raise OldAssertionError("copy_states copies one row, of equal length")
        if from_column or to_column:
            refuse("copy_states", "columns other than the first", "Copy from column 0.")
        owned = [] if self.owner is None else self.owner.held_ids()
        rows = self.pending_ids or owned
        copied = rows[from_row][:from_columns] if from_row < len(rows) else []
        ids = target.pending_ids or [[] for _ in range(target.batch_size)]
        for row in range(to_row, to_row + to_rows):
            ids[row] = list(copied)
        target.pending_ids = ids

    def footprint(self) -> list[int]:
        """Bytes of the cache, by device."""
        return [self.store.size_bytes]

    def all_tensors(self) -> list[Tensor]:
        return [*self.key_states, *self.value_states]

    @property
    def key_states(self) -> Sequence[Tensor]:
        """Keys by layer, in exl's pages: [pages, heads, 256, row]."""
        return [self.store.layer(i).keys for i in self.store.cached_layers]

    @property
    def value_states(self) -> Sequence[Tensor]:
        return [self.store.layer(i).values for i in self.store.cached_layers]

    def update_cache_tensors(self) -> None:
        """Does nothing: the tensors do not move."""

    def touch_device(self, device: Any) -> None:
        """Does nothing: there is one device."""

    def roll_left(self) -> None:
        """Drop the first column."""
        ids = self.pending_ids
        if ids is None:
            ids = [] if self.owner is None else self.owner.held_ids()
        self.pending_ids = [row[1:] for row in ids]

    @property
    def device(self) -> torch.device:
        return self.store.device


class ExLlamaV2Cache(ExLlamaV2CacheBase):
    """FP16 cache."""


class ExLlamaV2Cache_8bit(ExLlamaV2CacheBase):  # noqa: N801 - the old name
    """FP8 cache: E4M3, rounded to nearest."""

    kv_format = KVFormat.FP8


class ExLlamaV2Cache_Q(ExLlamaV2CacheBase):  # noqa: N801 - the old name
    """Base of the caches with integer codes."""


class ExLlamaV2Cache_Q4(ExLlamaV2Cache_Q):  # noqa: N801 - the old name
    kv_format = KVFormat.Q4
    wbits = 4


class ExLlamaV2Cache_Q6(ExLlamaV2Cache_Q):  # noqa: N801 - the old name
    kv_format = KVFormat.Q6
    wbits = 6


class ExLlamaV2Cache_Q8(ExLlamaV2Cache_Q):  # noqa: N801 - the old name
    kv_format = KVFormat.Q8
    wbits = 8


class ExLlamaV2Cache_TP(ExLlamaV2CacheBase):  # noqa: N801 - the old name
    """Cache of a model that `load_tp` loaded, in the precision of the class `base`."""

    def __init__(
        self,
        model: ExLlamaV2,
        base: type[ExLlamaV2CacheBase] = ExLlamaV2Cache,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: ExLlamaV2CacheBase | None = None,
    ) -> None:
        if model.tp_context is None:
            raise OldAssertionError(
                "ExLlamaV2Cache_TP needs a model that load_tp loaded",
                next_step="Call model.load_tp first, or use ExLlamaV2Cache.",
            )
        self.kv_format = base.kv_format
        self.wbits = base.wbits
        super().__init__(model, batch_size, max_seq_len, copy_from)
        self.caches = [self]

    def clone(self) -> ExLlamaV2CacheBase:
        other = ExLlamaV2Cache_TP(self.model, type(self), self.batch_size, self.max_seq_len)
        other._copy(self)
        return other
