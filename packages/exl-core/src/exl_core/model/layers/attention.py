"""Attention over a paged cache of keys and values, with its projections and norms.

Dimensions: R rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from exl_core.arch.layers import Attention
from exl_core.model.layers.residual import add_output, inputs_buffer
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights
from exl_core.ops.attention import Scoring
from exl_core.ops.table import LayerOps


class AttentionStep(NamedTuple):
    """Choices and numbers of one layer's attention, the same in every pass."""

    layer: int
    rope: int | None
    scoring: Scoring

    @classmethod
    def of(cls, layer: int, spec: Attention) -> AttentionStep:
        return cls(layer, spec.rope, Scoring(spec.scale, spec.window, spec.softcap or 0.0))


def attention(
    step: AttentionStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus attention of each row to its sequence."""
    weights, layer = block.attention, step.layer
    buffers = state.buffers[layer]
    out = inputs_buffer(ops, weights.output, buffers.queries, weights.post_norm)

    qkv = ops.norm_linear(x, weights.norm, weights.qkv, buffers.qkv)  # [R, (H + 2K) * D]
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
