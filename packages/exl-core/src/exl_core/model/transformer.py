"""The forward pass: embedding, the layers in order, head.

The functions of the layers are in `model/layers/`. One pass computes prefill chunks and decode rows
of many sequences together. The rows are flattened tokens; `Batch` assigns them to sequences, and
`KVStore` holds the keys and values of earlier passes. This module knows shapes and the choices of
an architecture; it knows neither requests nor files.

Dimension: R rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from exl_core.arch.layers import QueryTemperature
from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat, RowFormat, pages_for
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.adapted import adapt_embedding_, adapted, add_to_logits_, head_rows
from exl_core.model.adapters import AdapterUse
from exl_core.model.batch import Batch
from exl_core.model.key_smoothing import SAMPLE_POSITION_RANGE, KeySmoothingOps
from exl_core.model.layers.residual import normed, read_linear
from exl_core.model.layers.state import PassState, make_buffers
from exl_core.model.layers.steps import Steps, observed, steps_of, with_ops
from exl_core.model.observe import Observer, Part, checked_states
from exl_core.model.rotation import RotationTable
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.weights import BlockWeights, ModelWeights, StreamedWeights
from exl_core.ops.attention import AttentionRows, KeySmoothing
from exl_core.ops.table import LayerOps, OpTable

EMBEDDING, HEAD = Part("embedding"), Part("head")


class Transformer:
    """A model ready to run on one backend."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: OpTable,
        sample_ids: tuple[int, ...] = (),
    ) -> None:
        """`sample_ids`: text on which key smoothing is measured when keys are cached in 4 bits.
        Without it, keys are cached unsmoothed."""
        self.config = config
        self.ops = ops
        self.weights_bytes = weights.size_bytes
        self.decode_weight_bytes = weights.decode_bytes
        self.is_streamed = isinstance(weights, StreamedWeights)
        self._weights = weights
        self._steps = steps_of(config.layers)
        self._ropes = {
            index: None if index is None else RotationTable(config.ropes[index], ops.device)
            for index in _ropes_of(config)
        }
        settings = (layer.attention.temperature for layer in config.layers)
        self._temperatures = tuple(dict.fromkeys(one for one in settings if one is not None))
        self._sample_ids = sample_ids[: config.max_seq_len]

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore, observe: Observer | None = None) -> Tensor:
        """Logits, float32 [len(logit_rows), vocab_size]. Keys and values of all rows are written
        to `store`."""
        x = self._embedding(batch)  # [R, hidden]
        state = self._bind(batch, store)
        steps = adapted(self._steps, batch.adapters)
        if observe is not None:
            x = checked_states(EMBEDDING, observe.after(EMBEDDING, x), x)
            steps = observed(steps, observe)
        x = self._layers(x, steps, state)  # [R, hidden]

        if batch.logit_rows.shape[0] < x.shape[0]:  # else it lists every row
            x = x.index_select(0, batch.logit_rows.to(x.device))  # [n, hidden]
        return self._logits(x, batch, observe)  # [n, vocab]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Input of the first block for token_ids int64 [n]: float32 [n, hidden_size]."""
        x = self.ops.embedding(token_ids.to(self.ops.device), self._weights.embed)
        return self._scaled(x)

    def reserve_positions(self, end: int) -> None:
        """Computes the RoPE tables for positions below `end`.

        Afterwards, `Batch.positions` below `end` may be a GPU tensor, whose values the host does
        not read.
        """
        for rope in self._ropes.values():
            if rope is not None:
                rope.reserve(end)

    def check_adapters(self, uses: Iterable[AdapterUse]) -> None:
        """Raises RequestError for an adapter whose model has other dimensions than this one."""
        if not all(use.adapter.fits(self.config) for use in uses):
            raise RequestError(
                "an adapter was loaded for another model", next_step="Load it for this one."
            )

    def _scaled(self, x: Tensor) -> Tensor:
        if self.config.embed_factor != 1.0:
            x *= self.config.embed_factor
        return x

    def _embedding(self, batch: Batch) -> Tensor:
        token_ids = batch.token_ids.to(self.ops.device)
        x = self.ops.embedding(token_ids, self._weights.embed)  # [R, hidden]
        if batch.adapters:
            adapt_embedding_(x, batch, self.ops)
        x = self._scaled(x)
        if batch.embedded is not None:
            rows, vectors = batch.embedded
            if vectors.shape[1] != x.shape[1]:
                raise RequestError(
                    "embedded vectors are not as wide as the model's states",
                    expected=x.shape[1],
                    got=vectors.shape[1],
                )
            x.index_copy_(0, rows.to(x.device), vectors.to(x.device))  # never scaled
        return x

    def _logits(self, x: Tensor, batch: Batch, observe: Observer | None) -> Tensor:
        config, weights, ops = self.config, self._weights, self.ops
        if observe is None and not batch.adapters:
            out = None if batch.logits is None else batch.logits[: len(x)]
            logits = read_linear(ops, x, weights.final_norm, weights.head, out)
        else:
            x = normed(ops, x, weights.final_norm)
            if observe is not None:
                x = checked_states(HEAD, observe.before(HEAD, x), x)
            logits = self._adapted_logits(x, batch)
        if config.final_softcap is not None:
            logits = torch.tanh(logits / config.final_softcap) * config.final_softcap
        if observe is not None:
            logits = checked_states(HEAD, observe.after(HEAD, logits), logits)
        return logits

    def _adapted_logits(self, x: Tensor, batch: Batch) -> Tensor:
        """Logits of normed states [n, hidden], each range by the head of its adapters."""
        parts = []
        for first, last, head, deltas in head_rows(batch, self._weights.head):
            states = x[first:last]
            parts.append(self.ops.linear(states, head))
            add_to_logits_(parts[-1], states, deltas)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _layers(self, x: Tensor, steps: Steps, state: PassState) -> Tensor:
        """x [R, hidden] after all layers; the memory of x is overwritten."""
        ops, blocks = self.ops, self._weights.blocks
        for layer, of_layer in enumerate(steps):
            block = blocks[layer]
            for step in of_layer:
                x = step.run(ops, x, block, state)  # [R, hidden]
            del block  # of streamed weights, only one block is in memory
        return x

    def _bind(self, batch: Batch, store: KVStore) -> PassState:
        """Checks the batch and allocates buffers, once for all layers."""
        rows = AttentionRows(batch.page_table, batch.row_starts, batch.past_lens)
        angles = {index: self._angles(index, batch.positions) for index in self._ropes}
        bound = {
            index: self.ops.attention_batch(
                rows,
                batch.slots,
                *own,  # each [R, rotary_dim / 2]
                num_pages=store.num_pages,
                page_size=store.page_size,
            )
            for index, own in angles.items()
        }
        smoothing: tuple[KeySmoothing | None, ...] = (None,) * self.config.num_layers
        if store.kv_format.key_rows is RowFormat.CODES4 and len(self._sample_ids) > 1:
            smoothing = self._key_smoothing
        buffers = make_buffers(self.ops, self.config.layers, batch.token_ids.shape[0])
        factors = self._factors(batch.positions)
        return PassState(store, bound, smoothing, buffers, factors, angles)

    def _factors(self, positions: Tensor) -> dict[QueryTemperature | None, Tensor]:
        """Factors on the queries at int64 positions [R], by the layers' settings. Positions on a
        GPU are not read by the host."""
        found: dict[QueryTemperature | None, Tensor] = {}
        for setting in self._temperatures:
            periods = (positions + setting.offset) // setting.length
            if positions.device.type != "cpu" or bool(periods.any()):
                factors = 1.0 + setting.beta * torch.log1p(periods.to(torch.float32))
                found[setting] = factors.to(self.ops.device)
        return found

    def _angles(self, index: int | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of a RoPE table for int64 positions [R]; [R, 0] without RoPE."""
        rope = self._ropes[index]
        if rope is None:
            none = torch.empty(len(positions), 0, device=self.ops.device)
            return none, none
        return rope.at(positions)

    @cached_property
    def _key_smoothing(self) -> tuple[KeySmoothing, ...]:
        """Measured by the first pass that needs it, and constant from then on."""
        config, ids = self.config, self._sample_ids
        num_pages = pages_for(len(ids))
        text = Segment(
            token_ids=ids, past_len=0, page_ids=tuple(range(num_pages)), logit_rows=LogitRows.LAST
        )
        store = store_for(self, KVFormat.FP32, num_pages)
        batch = make_batch((text,), store.page_size)
        end = min(SAMPLE_POSITION_RANGE, config.max_seq_len) - 1
        positions = torch.linspace(0, end, len(ids), dtype=torch.float64).long()
        angles = {
            index: None if rope is None else rope.at(positions)
            for index, rope in self._ropes.items()
        }
        found: list[KeySmoothing] = []

        def wrap(ops: LayerOps, layer: int, _: BlockWeights) -> LayerOps:
            rope = config.layers[layer].attention.attend_rope
            return KeySmoothingOps(ops, self.ops, angles[rope], found.append)

        self._layers(self._embedding(batch), with_ops(self._steps, wrap), self._bind(batch, store))
        return tuple(found)


def _ropes_of(config: ModelConfig) -> dict[int | None, None]:
    """RoPE tables of all layers, and those that `attend_` applies; None for no RoPE."""
    layers = [layer.attention for layer in config.layers]
    return dict.fromkeys(rope for spec in layers for rope in (spec.rope, spec.attend_rope))
