"""Memory that the cache of an engine takes, from numbers alone: keys and values, recurrent states.

The engine sizes its cache by these numbers, and a plan of the devices counts the same bytes before
anything is read. Knows neither tensors (`store.py`, `state_store.py`) nor devices. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from exl_core.arch.layers import KVShape, StateShape
from exl_core.cache.format import (
    PAGE_SIZE,
    KVFormat,
    final_itemsize,
    kv_bytes_per_token,
    pages_for,
)
from exl_core.cache.state import SPARE_SLOTS, default_snapshots


class CacheShape(Protocol):
    """The numbers of a model that its cache depends on; `ModelConfig` has them."""

    @property
    def kv_shapes(self) -> Sequence[KVShape | None]: ...
    @property
    def state_shapes(self) -> Sequence[StateShape | None]: ...
    @property
    def state_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """Size of the cache of one engine.

    tokens      tokens of all sequences together; whole pages are allocated
    max_batch   most sequences in one pass
    has_drafts  before a draft is verified, the state of its sequence is kept in a second slot
    snapshots   most snapshots of recurrent state; None: `default_snapshots`
    """

    tokens: int
    kv_format: KVFormat = KVFormat.FP16
    max_batch: int = 1
    has_drafts: bool = False
    snapshots: int | None = None

    def with_format(self, kv_format: KVFormat) -> CacheNeed:
        """The same cache in another precision."""
        return replace(self, kv_format=kv_format)

    @property
    def num_pages(self) -> int:
        return pages_for(self.tokens)

    def kv_bytes(self, kv_shapes: Sequence[KVShape | None]) -> int:
        """Bytes of the keys and values of these layers. RequestError for heads that the format
        cannot hold."""
        return kv_bytes_per_token(kv_shapes, self.kv_format) * PAGE_SIZE * self.num_pages

    def final_bytes(self, hidden_size: int) -> int:
        """Bytes of the states after the final norm of all tokens, which a layer for multi-token
        prediction reads."""
        return hidden_size * final_itemsize(self.kv_format) * PAGE_SIZE * self.num_pages

    def snapshots_of(self, config: CacheShape) -> int:
        """Snapshots of recurrent state that are kept; 0 if the model has no recurrent layers."""
        if not config.state_bytes:
            return 0
        if self.snapshots is not None:
            return self.snapshots
        kv_bytes = self.kv_bytes(config.kv_shapes)
        return default_snapshots(kv_bytes, config.state_bytes, self.num_pages, self.max_batch)

    def slots(self, config: CacheShape) -> int:
        """Slots for recurrent states: of sequences, of their drafts, and of snapshots; 0 if the
        model has no recurrent layers."""
        if not config.state_bytes:
            return 0
        return self.max_batch * (2 if self.has_drafts else 1) + self.snapshots_of(config)

    def state_bytes(self, config: CacheShape, *, has_spare: bool) -> tuple[int, ...]:
        """Bytes of the states of each layer. `has_spare`: with the slots beside, which layers on a
        GPU have."""
        slots = self.slots(config) + (SPARE_SLOTS if has_spare else 0)
        return tuple(
            0 if shape is None else shape.size_bytes * slots for shape in config.state_shapes
        )

    def total_bytes(self, config: CacheShape, *, has_spare: bool) -> int:
        """Bytes of the keys, the values and the states of all layers."""
        states = self.state_bytes(config, has_spare=has_spare)
        return self.kv_bytes(config.kv_shapes) + sum(states)
