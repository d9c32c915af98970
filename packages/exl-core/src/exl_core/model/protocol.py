"""Interface of a model, as the runner and the engine use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from exl_core.arch.layers import KVShape, StateShape
from exl_core.cache.store import KVStore
from exl_core.model.adapters import AdapterUse
from exl_core.model.batch import Batch
from exl_core.model.segment import Segment
from exl_core.ops.table import OpTable


class ModelShape(Protocol):
    """The numbers of a model that the engine needs."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def kv_shapes(self) -> Sequence[KVShape | None]: ...
    @property
    def state_shapes(self) -> Sequence[StateShape | None]: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


class ModelStage(Protocol):
    """Consecutive layers on one device."""

    @property
    def layers(self) -> range: ...
    @property
    def ops(self) -> OpTable: ...
    def copy_from(self, x: Tensor, into: Tensor) -> None:
        """Copies a tensor of the stage before to `into`, on this stage's device."""
        ...


class Model(Protocol):
    """A forward pass over a batch, keeping keys and values in a store."""

    def check_adapters(self, uses: Iterable[AdapterUse]) -> None:
        """Raises RequestError for an adapter that was loaded for another model."""
        ...

    @property
    def config(self) -> ModelShape: ...
    @property
    def ops(self) -> OpTable:
        """Op table of the device that the logits are on."""
        ...

    @property
    def stages(self) -> Sequence[ModelStage]:
        """The model's layers, in order, by device."""
        ...

    @property
    def num_ranks(self) -> int:
        """Processes that the model is divided among, each with a part of every matrix."""
        ...

    @property
    def can_capture(self) -> bool:
        """Whether passes on a GPU can be captured as graphs: the host does nothing in them."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether the last stage computes logits. Otherwise later hosts do, and this process waits
        for them in every pass."""
        ...

    def replaying(
        self, store: KVStore, segments: Sequence[Segment]
    ) -> AbstractContextManager[Tensor | None]:
        """Context of a pass over `segments` as a captured graph, which is captured inside if it is
        missing. The other ranks do the same. Yields the states [R, hidden] after the layers of the
        host before, if there is one."""
        ...

    def replayed(self, found: Tensor, segments: Sequence[Segment]) -> Tensor:
        """The logits [n, vocab_size] of such a pass, which ends inside the context. `found`: result
        of the graph, states [R, hidden] without `has_head`."""
        ...

    def check_loaded(self) -> None:
        """Raises RequestError if the weights have been freed."""
        ...

    def forward(self, batch: Batch, store: KVStore) -> Tensor: ...
    def run_stage(
        self, index: int, batch: Batch, store: KVStore, x: Tensor | None = None
    ) -> Tensor:
        """The states [R, hidden] after a stage, or the logits of the last one. `x`: states after
        the stage before."""
        ...

    def reserve_positions(self, end: int) -> None: ...
