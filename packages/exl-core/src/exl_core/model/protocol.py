"""Interface of a model, as the runner and the engine use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from exl_core.arch.layers import KVShape
from exl_core.cache.store import KVStore
from exl_core.model.batch import Batch
from exl_core.ops.table import OpTable


class ModelShape(Protocol):
    """The numbers of a model that the engine needs."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def kv_shapes(self) -> Sequence[KVShape | None]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


class Model(Protocol):
    """A forward pass over a batch, keeping keys and values in a store."""

    @property
    def config(self) -> ModelShape: ...
    @property
    def ops(self) -> OpTable: ...
    @property
    def is_streamed(self) -> bool:
        """Weights are read from the files in every pass, so that passes cannot be captured."""
        ...

    def forward(self, batch: Batch, store: KVStore) -> Tensor: ...
    def reserve_positions(self, end: int) -> None: ...
