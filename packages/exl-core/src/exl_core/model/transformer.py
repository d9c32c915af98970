"""The forward pass, top to bottom.

One pass serves prefill chunks and decoding rows of many sequences at once: rows are flattened
tokens, `Batch` says which belong together, `KVStore` holds what went before. Knows shapes and the
choices of an architecture; knows neither requests nor files. R rows, H query heads, K key/value
heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.arch.spec import Activation, EmbedScale, ModelConfig, Window
from exl_core.cache.store import KVStore
from exl_core.model.batch import Batch
from exl_core.model.rotation import RotationTable
from exl_core.model.weights import ModelWeights
from exl_core.ops.table import AttentionBatch, GateKind, OpTable, PackedLinear

ACTIVATIONS: dict[Activation, GateKind] = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of one pass share: the rows, bound for each kind of layer, and room."""

    store: KVStore
    rows: dict[Window, AttentionBatch]
    qkv: Tensor  # [R, (H + 2K) * D]
    mixed: Tensor  # [R, H * D], of qkv: attention puts its result where the queries were
    gated: Tensor  # [R, intermediate]


class Transformer:
    """A model ready to run on one backend."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: OpTable) -> None:
        self.config = config
        self.ops = ops
        self.weights_bytes = weights.size_bytes
        self.decode_weight_bytes = weights.decode_bytes
        self._weights = weights
        self._activation = ACTIVATIONS[config.arch.activation]
        self._windows = tuple(config.window_of(layer) for layer in range(config.num_layers))
        self._rope = RotationTable(config.rope)
        self._local_rope = RotationTable(config.local_rope) if config.local_rope else None

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """Logits, float32 [len(logit_rows), vocab_size]; keys and values of all rows are stored."""
        config, weights, ops = self.config, self._weights, self.ops
        x = ops.embedding(batch.token_ids, weights.embed)  # [R, hidden]
        if config.arch.embed_scale is EmbedScale.SQRT_HIDDEN:
            x *= math.sqrt(config.hidden_size)

        current = self._bind(batch, store)
        for layer in range(config.num_layers):
            self._block(x, layer, current)  # [R, hidden], in place

        if batch.logit_rows.shape[0] < x.shape[0]:  # else it lists every row
            x = x.index_select(0, batch.logit_rows)  # [n, hidden]
        logits = ops.norm_linear(x, weights.final_norm, config.norm_eps, weights.head)  # [n, vocab]
        if config.final_softcap is not None:
            logits = torch.tanh(logits / config.final_softcap) * config.final_softcap
        return logits

    def _bind(self, batch: Batch, store: KVStore) -> _Pass:
        """Read, check and allocate once what all layers share."""

        def bound(rope: RotationTable) -> AttentionBatch:
            return self.ops.attention_batch(
                batch.page_table,
                batch.row_starts,
                batch.past_lens,
                batch.slots,
                *rope.at(batch.positions),  # each [R, rotary_dim / 2]
                num_pages=store.num_pages,
                page_size=store.page_size,
            )

        everywhere = bound(self._rope)
        local = bound(self._local_rope) if self._local_rope else everywhere
        rows, config = batch.token_ids.shape[0], self.config
        qkv = torch.empty(rows, config.q_size + 2 * config.kv_size)
        return _Pass(
            store,
            {Window.GLOBAL: everywhere, Window.LOCAL: local},
            qkv,
            qkv[:, : config.q_size],
            torch.empty(rows, config.intermediate_size),
        )

    def _block(self, x: Tensor, layer: int, current: _Pass) -> None:
        config, ops, block = self.config, self.ops, self._weights.blocks[layer]
        eps, attention, mlp = config.norm_eps, block.attention, block.mlp

        ops.norm_linear(x, block.attention_norm, eps, attention.qkv, current.qkv)
        ops.attend_(
            current.qkv,
            current.rows[config.layer_windows[layer]],
            current.store.key(layer),
            current.store.value(layer),
            attention.q_norm,
            attention.k_norm,
            eps,
            config.attention_scale,
            self._windows[layer],
            config.attention_softcap or 0.0,
        )
        self._add(x, current.mixed, attention.output, block.attention_post_norm)

        ops.norm_gated_linear(x, block.mlp_norm, eps, mlp.gate_up, self._activation, current.gated)
        self._add(x, current.gated, mlp.down, block.mlp_post_norm)

    def _add(self, x: Tensor, h: Tensor, w: PackedLinear, post_norm: Tensor | None) -> None:
        """x += h @ w, normed before it is added where the family says so."""
        if post_norm is None:
            self.ops.linear_add_(h, w, x)
        else:
            x.add_(self.ops.rms_norm(self.ops.linear(h, w), post_norm, self.config.norm_eps))
