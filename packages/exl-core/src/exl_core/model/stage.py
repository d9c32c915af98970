"""Consecutive layers of a model on one device.

A model on one device has one stage. A model that is split over several devices is a chain of
stages. Each stage has the op table, the RoPE tables and the buffers of its own layers, and passes
the states on to the next one. This module knows neither the embedding nor the head, and no device
but its own.

Dimension: R rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.layers import MLA, Attention, LayerSpec, QueryTemperature
from exl_core.arch.spec import ModelConfig
from exl_core.cache.store import KVStore
from exl_core.errors import UnsupportedModelError
from exl_core.model.batch import Batch
from exl_core.model.chunks import check_chunk, in_chunks
from exl_core.model.layers.state import PassState, RowsKey, make_buffers
from exl_core.model.layers.steps import Steps
from exl_core.model.rotation import RotationTable, query_factors
from exl_core.model.weights import BlockWeights
from exl_core.ops.attention import AttentionRows, KeySmoothing
from exl_core.ops.host_experts import HostExperts
from exl_core.ops.linear import NextRead
from exl_core.ops.recurrent import StateRows
from exl_core.ops.table import LayerOps, OpTable

PEER_TEST_VALUES = 1 << 21  # 8 MiB


class StageTable(NamedTuple):
    """The layers of a stage, by their indices in the model, and the op table of its device.

    `host` computes the experts of `host_layers`, which stay in the host's memory.
    """

    layers: range
    ops: OpTable
    host: HostExperts | None = None
    host_layers: Collection[int] = ()


class Stage:
    """Layers on one device, ready to run."""

    def __init__(self, config: ModelConfig, layers: range, ops: OpTable) -> None:
        self.layers = layers
        self.ops = ops
        self.copies_through_host = False
        """Whether states of the stage before pass through the host's memory, because a direct copy
        between the two GPUs is not correct (`peer_copies_work`)."""
        self._specs: Mapping[int, LayerSpec] = {i: config.layers[i] for i in layers}
        self._ropes = {
            index: None if index is None else RotationTable(config.ropes[index], ops.device)
            for index in _ropes_of(self._specs.values())
        }
        attending = _attending(self._specs.values())
        self._has_states = any(spec.state_shape is not None for spec in self._specs.values())
        keys = (RowsKey(one.attend_rope, one.chunk) for one in attending)
        self._row_keys = tuple(dict.fromkeys(keys))
        for key in self._row_keys:
            check_chunk(key.chunk)
        settings = (one.temperature for one in attending)
        self._temperatures = tuple(dict.fromkeys(one for one in settings if one is not None))

    def receive(self, x: Tensor) -> Tensor:
        """The states x [R, hidden] of the stage before, on this stage's device."""
        if x.device == self.ops.device:
            return x
        return (x.cpu() if self.copies_through_host else x).to(self.ops.device, non_blocking=True)

    def copy_from(self, x: Tensor, into: Tensor) -> None:
        """Copies a tensor of the stage before to `into`, on this stage's device. On GPUs the copy
        follows the work of both devices' current streams, and the host does not wait."""
        into.copy_(x.cpu() if self.copies_through_host else x, non_blocking=True)

    def reserve_positions(self, end: int) -> None:
        """Computes the RoPE tables for positions below `end`."""
        for rope in self._ropes.values():
            if rope is not None:
                rope.reserve(end)

    def bind(
        self, batch: Batch, store: KVStore, smoothing: Sequence[KeySmoothing | None]
    ) -> PassState:
        """Checks the batch and allocates buffers, once for all layers. `smoothing` is by layer of
        the model."""
        self.ops.begin_pass()
        if batch.slots.device.type == "cpu" and len(batch.slots):
            store.grow(int(batch.slots.max()) // store.page_size + 1)
        rows = AttentionRows(batch.page_table, batch.row_starts, batch.past_lens, batch.is_fresh)
        angles = {index: self.angles(index, batch.positions) for index in self._ropes}
        bound = {
            key: self.ops.attention_batch(
                in_chunks(rows, batch.positions, key.chunk, store.page_size) if key.chunk else rows,
                batch.slots,
                *angles[key.rope],  # each [R, rotary_dim / 2]
                num_pages=store.num_pages,
                page_size=store.page_size,
            )
            for key in self._row_keys
        }
        buffers = make_buffers(self.ops, self._specs, batch.token_ids.shape[0])
        factors = self._factors(batch.positions)
        held = (store.states, self._state_rows(batch, store)) if self._has_states else (None, None)
        return PassState(store, bound, smoothing, buffers, factors, angles, *held)

    def _state_rows(self, batch: Batch, store: KVStore) -> StateRows:
        """Slots of the sequences' states, on this device. Raises UnsupportedModelError for a caller
        without any."""
        if batch.states is None or store.states is None:
            raise UnsupportedModelError(
                "a model with recurrent layers is not supported here",
                expected="attention in every layer",
            )
        operands = (batch.row_starts, batch.past_lens, batch.states)
        return StateRows(*(self.ops.bring(operand) for operand in operands))

    def run(
        self, x: Tensor, steps: Steps, blocks: Sequence[BlockWeights], state: PassState
    ) -> Tensor:
        """x [R, hidden] after the stage's layers; the memory of x is overwritten. `steps` and
        `blocks` are by layer of the model."""
        for layer in self.layers:
            block = blocks[layer]
            for index, step in enumerate(steps[layer]):
                ops: LayerOps | None = None
                if self.ops.before is not None:
                    read = self._next_read(steps, blocks, block, (layer, index))
                    ops = None if read is None else self.ops.before(read)
                x = step.run(ops or self.ops, x, block, state)  # [R, hidden]
            del block  # of streamed weights, only one block is in memory
        return x

    def _next_read(
        self,
        steps: Steps,
        blocks: Sequence[BlockWeights],
        block: BlockWeights,
        place: tuple[int, int],
    ) -> NextRead | None:
        """How the step after that at `place`, a layer and a number in it, reads the sum with which
        the latter ends. None if it does not end so, or if other ops may read the sum."""
        layer, index = place
        if steps[layer][index].finish is None or block.scalar is not None:
            return None
        if index + 1 < len(steps[layer]):
            following = steps[layer][index + 1]
        # Streamed blocks, which are no tuple, are read one at a time.
        elif layer + 1 in self.layers and isinstance(blocks, tuple):
            following, block = steps[layer + 1][0], blocks[layer + 1]
        else:
            return None
        return None if following.read is None else following.read(block)

    def angles(self, index: int | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of a RoPE table for int64 positions [R]; [R, 0] without RoPE."""
        rope = self._ropes[index]
        if rope is None:
            none = torch.empty(len(positions), 0, device=self.ops.device)
            return none, none
        return rope.at(positions)

    def _factors(self, positions: Tensor) -> dict[QueryTemperature | None, Tensor]:
        """Factors on the queries at int64 positions [R], by the layers' settings. Positions on a
        GPU are not read by the host."""
        found: dict[QueryTemperature | None, Tensor] = {}
        for setting in self._temperatures:
            factors = query_factors(setting, positions)
            if factors is not None:
                found[setting] = factors.to(self.ops.device)
        return found


def peer_copies_work(source: torch.device, target: torch.device) -> bool:
    """Whether a copy between two GPUs arrives as it was sent.

    Drivers report peer access on some machines where copies arrive as zeros, so a pattern is sent
    and compared.
    """
    pattern = torch.arange(PEER_TEST_VALUES, dtype=torch.int32)
    arrived = pattern.to(source).to(target).cpu()
    return torch.equal(arrived, pattern)


def _ropes_of(specs: Iterable[LayerSpec]) -> dict[int | None, None]:
    """RoPE tables of the layers, and those that `attend_` applies; None for no RoPE."""
    layers = _attending(specs)
    return dict.fromkeys(rope for spec in layers for rope in (spec.rope, spec.attend_rope))


def _attending(specs: Iterable[LayerSpec]) -> list[Attention | MLA]:
    """Mixers of the layers that attend to cached rows."""
    return [spec.attending for spec in specs if spec.attending is not None]
