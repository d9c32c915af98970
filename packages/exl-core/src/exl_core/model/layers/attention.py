"""Attention over a paged cache of keys and values, with its projections and norms.

Dimensions: R rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.layers import Attention, QueryTemperature
from exl_core.model.layers.residual import add_output, inputs_buffer, normed, read_linear
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights
from exl_core.ops.attention import Scoring
from exl_core.ops.elementwise import LayerNorm, Norm
from exl_core.ops.linear import Inputs
from exl_core.ops.table import LayerOps


class AttentionStep(NamedTuple):
    """Choices and numbers of one layer's attention, the same in every pass."""

    layer: int
    rope: int | None
    scoring: Scoring
    q_size: int
    kv_size: int
    head_dim: int
    temperature: QueryTemperature | None

    @classmethod
    def of(cls, layer: int, spec: Attention) -> AttentionStep:
        scoring = Scoring(spec.scale, spec.window, spec.softcap or 0.0)
        return cls(
            layer, spec.rope, scoring, spec.q_size, spec.kv_size, spec.head_dim, spec.temperature
        )


def attention(
    step: AttentionStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus attention of each row to its sequence."""
    weights = block.attention
    h = attended(step, ops, x, block, state, norm=weights.norm)
    return add_output(ops, x, h, weights.output, weights.post_norm)  # [R, hidden]


def attended(
    step: AttentionStep,
    ops: LayerOps,
    x: Tensor,
    block: BlockWeights,
    state: PassState,
    *,
    norm: Norm | None,
) -> Inputs:
    """Inputs of the matrix `output` [R, H * D], for states x [R, hidden] before `norm`."""
    weights, layer = block.attention, step.layer
    buffers = state.buffers[layer]
    out: Inputs | None = inputs_buffer(ops, weights.output, buffers.queries, weights.post_norm)

    qkv = read_linear(ops, x, norm, weights.qkv, buffers.qkv)  # [R, (H + 2K) * D]
    factors = state.temperatures.get(step.temperature)
    if weights.whole_norms is not None or factors is not None:
        qkv = _changed(step, ops, qkv, weights.whole_norms, factors)
    if qkv is not buffers.qkv and isinstance(out, Tensor):
        out = None  # the result replaces the queries in qkv
    return ops.attend_(
        qkv,
        state.rows[step.rope],
        state.caches.layer(layer),
        step.scoring,
        norms=weights.head_norms,
        smoothing=state.smoothing[layer],
        out=out,
    )


def _changed(
    step: AttentionStep,
    ops: LayerOps,
    qkv: Tensor,
    norms: tuple[Norm, Norm] | None,
    factors: Tensor | None,
) -> Tensor:
    """qkv [R, (H + 2K) * D] with norms of queries and keys before RoPE, and `factors` [R] on the
    queries."""
    q, k, v = qkv.split_with_sizes([step.q_size, step.kv_size, step.kv_size], 1)
    if norms is not None:
        q, k = _normed_heads(step, ops, q, norms[0]), _normed_heads(step, ops, k, norms[1])
    if factors is not None:
        q = q * factors[:, None]
    return torch.cat([q.to(v.dtype), k.to(v.dtype), v], 1)


def _normed_heads(step: AttentionStep, ops: LayerOps, x: Tensor, norm: Norm) -> Tensor:
    """x [R, heads * D] with an RMSNorm over all heads, or a LayerNorm of each head. `norm` has
    factors for all heads."""
    if not isinstance(norm, LayerNorm):
        return normed(ops, x, norm)
    heads = x.reshape(-1, step.head_dim)  # [R * heads, D]
    plain = LayerNorm(torch.ones(step.head_dim, device=x.device), None, norm.eps)
    return ops.layer_norm(heads, plain).view(x.shape) * norm.weight
