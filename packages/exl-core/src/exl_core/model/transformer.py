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
    """What every layer of one pass needs: the rows, bound once for each kind of layer."""

    store: KVStore
    rows: dict[Window, AttentionBatch]


class Transformer:
    """A model ready to run on one backend."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: OpTable) -> None:
        self.config = config
        self.ops = ops
        self.weights_bytes = weights.size_bytes
        self._weights = weights
        self._activation = ACTIVATIONS[config.arch.activation]
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
        """Check and read what all layers share, once."""

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
        return _Pass(store, {Window.GLOBAL: everywhere, Window.LOCAL: local})

    def _block(self, x: Tensor, layer: int, current: _Pass) -> None:
        config, ops, block = self.config, self.ops, self._weights.blocks[layer]
        eps, attention, mlp = config.norm_eps, block.attention, block.mlp

        qkv = ops.norm_linear(x, block.attention_norm, eps, attention.qkv)  # [R, (H + 2K) * D]
        mixed = ops.attend(
            qkv,
            current.rows[config.layer_windows[layer]],
            current.store.key(layer),
            current.store.value(layer),
            attention.q_norm,
            attention.k_norm,
            eps,
            scale=config.attention_scale,
            window=config.window_of(layer),
            softcap=config.attention_softcap or 0.0,
        )  # [R, H * D]
        self._add(x, mixed, attention.output, block.attention_post_norm)

        h = ops.norm_gated_linear(x, block.mlp_norm, eps, mlp.gate_up, self._activation)
        self._add(x, h, mlp.down, block.mlp_post_norm)

    def _add(self, x: Tensor, h: Tensor, w: PackedLinear, post_norm: Tensor | None) -> None:
        """x += h @ w, normed before it is added where the family says so."""
        if post_norm is None:
            self.ops.linear_add_(h, w, x)
        else:
            x.add_(self.ops.rms_norm(self.ops.linear(h, w), post_norm, self.config.norm_eps))
