"""Attention over a paged cache of keys and values, with its projections and norms.

Dimensions: R rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.arch.layers import Attention, QueryTemperature
from exl_core.model.layers.residual import (
    add_output,
    gated_inputs,
    inputs_buffer,
    normed,
    read_linear,
)
from exl_core.model.layers.state import PassState, RowsKey
from exl_core.model.weights import AttentionWeights, BlockWeights
from exl_core.ops.attention import Scoring
from exl_core.ops.elementwise import Gating, LayerNorm, Norm
from exl_core.ops.linear import Inputs
from exl_core.ops.table import LayerOps


class AttentionStep(NamedTuple):
    """Choices and numbers of one layer's attention, the same in every pass."""

    layer: int
    rows: RowsKey
    scoring: Scoring
    q_size: int
    kv_size: int
    head_dim: int
    temperature: QueryTemperature | None
    is_value_key: bool
    own_rope: int | None
    clip: float | None
    gating: Gating | None

    @classmethod
    def of(cls, layer: int, spec: Attention) -> AttentionStep:
        scoring = Scoring(spec.scale, spec.window, spec.softcap or 0.0)
        return cls(
            layer,
            RowsKey(spec.attend_rope, spec.chunk),
            scoring,
            spec.q_size,
            spec.kv_size,
            spec.head_dim,
            spec.temperature,
            spec.is_value_key,
            None if spec.attend_rope == spec.rope else spec.rope,
            spec.clip,
            Gating("sigmoid", spec.head_dim) if spec.has_gate else None,
        )


def attention(
    step: AttentionStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus attention of each row to its sequence."""
    norm = block.attention.norm
    h = attended(step, ops, x, block, state, norm=norm)  # [R, H * D]
    return add_attended(ops, x, h, block)  # [R, hidden]


def add_attended(ops: LayerOps, x: Tensor, h: Inputs, block: BlockWeights) -> Tensor:
    """x [R, hidden] plus the output of attention, for inputs h [R, H * D] of its last matrix."""
    weights = block.attention
    return add_output(ops, x, h, weights.output, weights.post_norm)


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
    out: Inputs | None = None
    if step.gating is None:  # otherwise the result is multiplied first
        out = inputs_buffer(ops, weights.output, buffers.queries, weights.post_norm)

    qkv = read_linear(ops, x, norm, weights.qkv, buffers.qkv)  # [R, (H + 2K) * D]
    gate: Tensor | None = None
    if step.gating is not None:
        qkv, gate = qkv.split_with_sizes([qkv.shape[-1] - step.q_size, step.q_size], -1)
    if step.clip is not None:
        qkv = qkv.clamp(-step.clip, step.clip)
    factors = state.temperatures.get(step.temperature)
    if step.is_value_key or factors is not None or has_norms(weights):
        if step.own_rope is not None:
            qkv = _rotated(step, qkv, *state.angles[step.own_rope])
        qkv = _changed(step, ops, qkv, weights, factors)
    if qkv is not buffers.qkv and isinstance(out, Tensor):
        out = None  # the result replaces the queries in qkv
    h = ops.attend_(
        qkv,
        state.rows[step.rows],
        state.caches.layer(layer),
        step.scoring,
        norms=weights.head_norms,
        smoothing=state.smoothing[layer],
        sinks=weights.sinks,
        out=out,
    )
    if step.gating is None or gate is None:
        return h
    to, post_norm = weights.output, weights.post_norm
    return gated_inputs(ops, cast(Tensor, h), gate, step.gating, to, post_norm=post_norm)


def has_norms(weights: AttentionWeights) -> bool:
    """Whether there are norms besides those of `attend_`."""
    return weights.whole_norms is not None or weights.value_norm is not None


def _changed(
    step: AttentionStep,
    ops: LayerOps,
    qkv: Tensor,
    weights: AttentionWeights,
    factors: Tensor | None,
) -> Tensor:
    """Queries, keys and values [R, (H + 2K) * D] from the projection, with all that `attend_` does
    not compute: values from keys, norms, and `factors` [R] on the queries."""
    sizes = [step.q_size, *[step.kv_size] * (1 if step.is_value_key else 2)]
    q, k, *rest = qkv.split_with_sizes(sizes, -1)
    v = rest[0] if rest else k
    if weights.value_norm is not None:
        heads = v.reshape(-1, step.head_dim)  # [R * K, D]
        v = normed(ops, heads, weights.value_norm).view(v.shape)
    if weights.whole_norms is not None:
        q_norm, k_norm = weights.whole_norms
        q, k = _normed_heads(step, ops, q, q_norm), _normed_heads(step, ops, k, k_norm)
    if factors is not None:
        q = q * factors[:, None]
    return torch.cat([part.to(qkv.dtype) for part in (q, k, v)], -1)


def _normed_heads(step: AttentionStep, ops: LayerOps, x: Tensor, norm: Norm) -> Tensor:
    """x [R, heads * D] with an RMSNorm over all heads or of each head, or a LayerNorm of each head
    with factors for all heads."""
    if not isinstance(norm, LayerNorm):
        rows = x if len(norm.weight) == x.shape[-1] else x.reshape(-1, step.head_dim)
        return normed(ops, rows, norm).view(x.shape)
    heads = x.reshape(-1, step.head_dim)  # [R * heads, D]
    plain = LayerNorm(torch.ones(step.head_dim, device=x.device), None, norm.eps)
    return ops.layer_norm(heads, plain).view(x.shape) * norm.weight


def _rotated(step: AttentionStep, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """qkv [R, (H + 2K) * D] with RoPE on queries and keys; cos, sin [R, rotary_dim / 2]."""
    last, half = step.q_size + step.kv_size, cos.shape[1]
    shape = (*qkv.shape[:-1], -1, step.head_dim)
    heads = qkv[..., :last].reshape(shape).to(cos.dtype)  # [R, H + K, D]
    a, b, rest = heads.split_with_sizes([half, half, step.head_dim - 2 * half], -1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).flatten(-2)
    return torch.cat([rotated.to(qkv.dtype), qkv[..., last:]], -1)
