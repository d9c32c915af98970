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

from exl_core.arch.rope import inverse_frequencies
from exl_core.arch.spec import Activation, EmbedScale, ModelConfig, RopeConfig, Window
from exl_core.cache.store import KVStore
from exl_core.model.batch import Batch
from exl_core.model.weights import ModelWeights
from exl_core.ops.table import GateKind, OpTable

ACTIVATIONS: dict[Activation, GateKind] = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class _Pass:
    """What every layer of one pass needs: cos and sin [R, rotary_dim / 2] by kind of layer."""

    batch: Batch
    store: KVStore
    rotations: dict[Window, tuple[Tensor, Tensor]]


class Transformer:
    """A model ready to run on one backend."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: OpTable) -> None:
        self.config = config
        self.ops = ops
        self.weights_bytes = weights.size_bytes
        self._weights = weights
        self._activation = ACTIVATIONS[config.arch.activation]
        self._rope = _RotationTable(config.rope)
        self._local_rope = _RotationTable(config.local_rope) if config.local_rope else None

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """Logits, float32 [len(logit_rows), vocab_size]; keys and values of all rows are stored."""
        config, weights, ops = self.config, self._weights, self.ops
        x = ops.embedding(batch.token_ids, weights.embed)  # [R, hidden]
        if config.arch.embed_scale is EmbedScale.SQRT_HIDDEN:
            x *= math.sqrt(config.hidden_size)

        rotation = self._rope.at(batch.positions)
        local = self._local_rope.at(batch.positions) if self._local_rope else rotation
        current = _Pass(batch, store, {Window.GLOBAL: rotation, Window.LOCAL: local})
        for layer in range(config.num_layers):
            x = self._block(x, layer, current)  # [R, hidden]

        x = x.index_select(0, batch.logit_rows)  # [n, hidden]
        x = ops.rms_norm(x, weights.final_norm, config.norm_eps)
        logits = ops.linear(x, weights.head)  # [n, vocab]
        if config.final_softcap is not None:
            logits = torch.tanh(logits / config.final_softcap) * config.final_softcap
        return logits

    def _block(self, x: Tensor, layer: int, current: _Pass) -> Tensor:
        ops, eps, block = self.ops, self.config.norm_eps, self._weights.blocks[layer]
        h = ops.rms_norm(x, block.attention_norm, eps)
        h = self._attention(h, layer, current)
        if block.attention_post_norm is not None:
            h = ops.rms_norm(h, block.attention_post_norm, eps)
        x = x.add_(h)

        h = ops.rms_norm(x, block.mlp_norm, eps)
        h = ops.gated_activation(ops.linear(h, block.mlp.gate_up), self._activation)
        h = ops.linear(h, block.mlp.down)
        if block.mlp_post_norm is not None:
            h = ops.rms_norm(h, block.mlp_post_norm, eps)
        return x.add_(h)

    def _attention(self, x: Tensor, layer: int, current: _Pass) -> Tensor:
        config, ops, batch = self.config, self.ops, current.batch
        weights = self._weights.blocks[layer].attention
        qkv = ops.linear(x, weights.qkv)  # [R, (H + 2K) * D]
        q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=1)
        q = q.view(-1, config.num_q_heads, config.head_dim)  # [R, H, D]
        k = k.view(-1, config.num_kv_heads, config.head_dim)  # [R, K, D]
        v = v.view(-1, config.num_kv_heads, config.head_dim)  # [R, K, D]
        if weights.q_norm is not None and weights.k_norm is not None:
            ops.rms_norm_heads_(q, weights.q_norm, config.norm_eps)
            ops.rms_norm_heads_(k, weights.k_norm, config.norm_eps)
        cos, sin = current.rotations[config.layer_windows[layer]]
        ops.rope_(q, cos, sin)
        ops.rope_(k, cos, sin)

        keys, values = current.store.key(layer), current.store.value(layer)
        ops.write_kv(k, v, keys, values, batch.slots)
        mixed = ops.paged_attention(
            q,
            keys,
            values,
            batch.page_table,
            batch.row_starts,
            batch.past_lens,
            scale=config.attention_scale,
            window=config.window_of(layer),
            softcap=config.attention_softcap or 0.0,
        )  # [R, H * D]
        return ops.linear(mixed, weights.output)


class _RotationTable:
    """Cosines and sines for any positions, computed when asked: they cost less than they weigh."""

    def __init__(self, rope: RopeConfig) -> None:
        frequencies, self._multiplier = inverse_frequencies(rope)
        # float64, because position * frequency reaches 1e5 radians in long contexts.
        self._frequencies = torch.tensor(frequencies, dtype=torch.float64)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [R, rotary_dim / 2], for int64 positions [R]."""
        angles = torch.outer(positions.double(), self._frequencies)
        cos, sin = torch.cos(angles), torch.sin(angles)
        return (cos * self._multiplier).float(), (sin * self._multiplier).float()
