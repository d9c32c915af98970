"""Attention over a paged cache of keys and values, with its projections and norms.

Dimensions: R rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.layers import Attention, QueryTemperature
from exl_core.model.layers.residual import add_output, inputs_buffer, read_linear
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights
from exl_core.ops.attention import Scoring
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.table import LayerOps


class AttentionStep(NamedTuple):
    """Choices and numbers of one layer's attention, the same in every pass."""

    layer: int
    rope: int | None
    scoring: Scoring
    q_size: int
    kv_size: int
    temperature: QueryTemperature | None

    @classmethod
    def of(cls, layer: int, spec: Attention) -> AttentionStep:
        scoring = Scoring(spec.scale, spec.window, spec.softcap or 0.0)
        return cls(layer, spec.rope, scoring, spec.q_size, spec.kv_size, spec.temperature)


def attention(
    step: AttentionStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus attention of each row to its sequence."""
    weights, layer = block.attention, step.layer
    buffers = state.buffers[layer]
    out = inputs_buffer(ops, weights.output, buffers.queries, weights.post_norm)

    qkv = read_linear(ops, x, weights.norm, weights.qkv, buffers.qkv)  # [R, (H + 2K) * D]
    factors = state.temperatures.get(step.temperature)
    if weights.whole_norms is not None or factors is not None:
        qkv = _changed(step, ops, qkv, weights.whole_norms, factors)
    if qkv is not buffers.qkv and isinstance(out, Tensor):
        out = None  # the result replaces the queries in qkv
    h = ops.attend_(
        qkv,
        state.rows[step.rope],
        state.caches.layer(layer),
        step.scoring,
        norms=weights.head_norms,
        smoothing=state.smoothing[layer],
        out=out,
    )  # [R, H * D]
    return add_output(ops, x, h, weights.output, weights.post_norm)  # [R, hidden]


def _changed(
    step: AttentionStep,
    ops: LayerOps,
    qkv: Tensor,
    norms: tuple[RmsNorm, RmsNorm] | None,
    factors: Tensor | None,
) -> Tensor:
    """qkv [R, (H + 2K) * D] with norms over all queries and all keys, and `factors` [R] on the
    queries."""
    q, k, v = qkv.split_with_sizes([step.q_size, step.kv_size, step.kv_size], 1)
    if norms is not None:
        q, k = ops.rms_norm(q, norms[0]), ops.rms_norm(k, norms[1])
    if factors is not None:
        q = q * factors[:, None]
    return torch.cat([q.to(v.dtype), k.to(v.dtype), v], 1)
