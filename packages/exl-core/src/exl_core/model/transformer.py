"""The forward pass, top to bottom.

One pass computes prefill chunks and decode rows of many sequences together. The rows are flattened
tokens; `Batch` assigns them to sequences, and `KVStore` holds the keys and values of earlier
passes. This module knows shapes and the choices of an architecture; it knows neither requests nor
files.

Dimensions: R rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from exl_core.arch.layers import Activation
from exl_core.arch.modules import Packed
from exl_core.arch.spec import EmbedScale, ModelConfig
from exl_core.cache.format import KVFormat, RowFormat, pages_for
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.adapted import (
    adapt_embedding_,
    add_deltas_,
    add_to_logits_,
    head_rows,
    is_adapted,
)
from exl_core.model.adapters import AdapterUse
from exl_core.model.batch import AdapterRows, Batch
from exl_core.model.key_smoothing import SAMPLE_POSITION_RANGE, KeySmoothingObserver
from exl_core.model.observe import Observer, Part, checked_states
from exl_core.model.rotation import RotationTable
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.weights import ModelWeights
from exl_core.ops.attention import AttentionBatch, AttentionRows, KeySmoothing, Scoring
from exl_core.ops.elementwise import GateKind, RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.table import OpTable

ACTIVATIONS: dict[Activation, GateKind] = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
}
EMBEDDING, HEAD = Part("embedding"), Part("head")


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory that all layers of the same sizes use, one after the other."""

    qkv: Tensor  # [R, (H + 2K) * D]
    attended: Tensor  # [R, H * D], a view of qkv: attention's result overwrites the queries
    gated: Tensor  # [R, intermediate]


@dataclass(frozen=True, slots=True)
class _Pass:
    """State that the layers of one pass share: bound rows, cache, buffers."""

    store: KVStore
    adapters: tuple[AdapterRows, ...]
    rows: tuple[AttentionBatch, ...]  # by RoPE table
    key_smoothing: tuple[KeySmoothing | None, ...]  # by layer
    buffers: tuple[_Buffers, ...]  # by layer


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
        self._weights = weights
        self._attentions = tuple(layer.attention for layer in config.layers)
        self._scoring = tuple(
            Scoring(spec.scale, spec.window, spec.softcap or 0.0) for spec in self._attentions
        )
        self._mlps = tuple(layer.dense for layer in config.layers)
        self._sizes = tuple(
            (attention.qkv_size, attention.q_size, mlp.intermediate_size)
            for attention, mlp in zip(self._attentions, self._mlps, strict=True)
        )
        self._ropes = tuple(RotationTable(rope, ops.device) for rope in config.ropes)
        self._sample_ids = sample_ids[: config.max_seq_len]

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore, observe: Observer | None = None) -> Tensor:
        """Logits, float32 [len(logit_rows), vocab_size]. Keys and values of all rows are written
        to `store`."""
        x = self._embedding(batch)  # [R, hidden]
        current = self._bind(batch, store)
        if observe is None:
            for layer in range(self.config.num_layers):
                self._attend(x, layer, current)  # [R, hidden], in place
                self._transform(x, layer, current)  # [R, hidden], in place
        else:
            x = self._observed_blocks(x, current, observe)

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
        for rope in self._ropes:
            rope.reserve(end)

    def check_adapters(self, uses: Iterable[AdapterUse]) -> None:
        """Raises RequestError for an adapter whose model has other dimensions than this one."""
        if not all(use.adapter.fits(self.config) for use in uses):
            raise RequestError(
                "an adapter was loaded for another model", next_step="Load it for this one."
            )

    def _scaled(self, x: Tensor) -> Tensor:
        if self.config.arch.embed_scale is EmbedScale.SQRT_HIDDEN:
            x *= math.sqrt(self.config.hidden_size)
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
            logits = ops.norm_linear(x, weights.final_norm, weights.head, out)
        else:
            x = ops.rms_norm(x, weights.final_norm)
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

    def _observed_blocks(self, x: Tensor, current: _Pass, observe: Observer) -> Tensor:
        x = checked_states(EMBEDDING, observe.after(EMBEDDING, x), x)
        for layer in range(self.config.num_layers):
            for part, run in (
                (Part("attention", layer), self._attend),
                (Part("mlp", layer), self._transform),
            ):
                x = checked_states(part, observe.before(part, x), x)
                run(x, layer, current)
                x = checked_states(part, observe.after(part, x), x)
        return x

    def _bind(self, batch: Batch, store: KVStore) -> _Pass:
        """Checks the batch and allocates buffers, once for all layers."""
        rows = AttentionRows(batch.page_table, batch.row_starts, batch.past_lens)

        def bound(rope: RotationTable) -> AttentionBatch:
            return self.ops.attention_batch(
                rows,
                batch.slots,
                *rope.at(batch.positions),  # each [R, rotary_dim / 2]
                num_pages=store.num_pages,
                page_size=store.page_size,
            )

        smoothing: tuple[KeySmoothing | None, ...] = (None,) * self.config.num_layers
        if store.kv_format.key_rows is RowFormat.CODES4 and len(self._sample_ids) > 1:
            smoothing = self._key_smoothing
        return _Pass(
            store,
            batch.adapters,
            tuple(bound(rope) for rope in self._ropes),
            smoothing,
            self._buffers(batch.token_ids.shape[0]),
        )

    def _buffers(self, rows: int) -> tuple[_Buffers, ...]:
        """Buffers by layer. Layers of the same sizes share theirs."""
        made: dict[tuple[int, int, int], _Buffers] = {}
        for sizes in dict.fromkeys(self._sizes):
            qkv_size, q_size, intermediate_size = sizes
            qkv = self.ops.activations(rows, qkv_size)
            gated = self.ops.activations(rows, intermediate_size)
            made[sizes] = _Buffers(qkv, qkv[:, :q_size], gated)
        return tuple(made[sizes] for sizes in self._sizes)

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
        angles = [rope.at(positions) for rope in self._ropes]
        observer = KeySmoothingObserver(
            config, self._weights, self.ops, lambda layer: angles[self._attentions[layer].rope]
        )
        self.forward(batch, store, observer)
        return tuple(observer.layers)

    def _attend(self, x: Tensor, layer: int, current: _Pass) -> None:
        """x [R, hidden] += attention of the layer."""
        ops, block = self.ops, self._weights.blocks[layer]
        attention, adapters = block.attention, current.adapters
        qkv, attended = current.buffers[layer].qkv, current.buffers[layer].attended

        ops.norm_linear(x, block.attention_norm, attention.qkv, qkv)
        if adapters and is_adapted(adapters, layer, "qkv"):
            normed = ops.rms_norm(x, block.attention_norm)
            add_deltas_(qkv, normed, adapters, layer, "qkv")
        h: Inputs = attended
        post_norm = block.attention_post_norm
        if post_norm is None and not adapters:
            h = ops.inputs_for(attention.output, attended)
        ops.attend_(
            qkv,
            current.rows[self._attentions[layer].rope],
            current.store.layer(layer),
            self._scoring[layer],
            norms=attention.head_norms,
            smoothing=current.key_smoothing[layer],
            out=None if isinstance(h, Tensor) else h,
        )
        self._add(x, h, attention.output, post_norm, adapters, at=(layer, "output"))

    def _transform(self, x: Tensor, layer: int, current: _Pass) -> None:
        """x [R, hidden] += MLP of the layer."""
        ops, block = self.ops, self._weights.blocks[layer]
        mlp, adapters = block.mlp, current.adapters
        activation = ACTIVATIONS[self._mlps[layer].activation]
        gated = current.buffers[layer].gated
        h: Inputs = gated

        if adapters and is_adapted(adapters, layer, "gate_up"):
            gate_up = ops.norm_linear(x, block.mlp_norm, mlp.gate_up)  # [R, 2 * intermediate]
            normed = ops.rms_norm(x, block.mlp_norm)
            add_deltas_(gate_up, normed, adapters, layer, "gate_up")
            h = ops.gated_activation(gate_up, activation)
        else:
            if block.mlp_post_norm is None and not adapters:
                h = ops.inputs_for(mlp.down, gated)
            ops.norm_gated_linear(x, block.mlp_norm, mlp.gate_up, activation, h)
        self._add(x, h, mlp.down, block.mlp_post_norm, adapters, at=(layer, "down"))

    def _add(
        self,
        x: Tensor,
        h: Inputs,
        w: PackedLinear,
        post_norm: RmsNorm | None,
        adapters: tuple[AdapterRows, ...],
        *,
        at: tuple[int, Packed],
    ) -> None:
        """x += h @ w plus the adapters' deltas. With `post_norm` the sum is normed before it is
        added to x."""
        if post_norm is None:
            self.ops.linear_add_(h, w, x)
            if adapters:
                add_deltas_(x, cast(Tensor, h), adapters, *at)
        else:
            plain = cast(Tensor, h)
            y = self.ops.linear(plain, w)
            add_deltas_(y, plain, adapters, *at)
            x.add_(self.ops.rms_norm(y, post_norm))
