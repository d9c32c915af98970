"""Latent attention (MLA) over a paged cache of latent vectors, with its projections and norms.

Dimensions: R rows, H query heads, n and p elements of a query head without and with RoPE, r
elements of a latent vector, v elements of a value head.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from exl_core.arch.layers import MLA, QueryTemperature
from exl_core.model.layers.residual import add_output, read_linear
from exl_core.model.layers.state import PassState, RowsKey
from exl_core.model.weights import BlockWeights, LatentWeights
from exl_core.ops.attention import Scoring
from exl_core.ops.linear import Inputs
from exl_core.ops.table import LayerOps


class LatentStep(NamedTuple):
    """Choices and numbers of one layer's latent attention, the same in every pass."""

    layer: int
    rows: RowsKey
    scoring: Scoring
    q_width: int
    kv_rank: int
    rope_dim: int
    temperature: QueryTemperature | None

    @classmethod
    def of(cls, layer: int, spec: MLA) -> LatentStep:
        return cls(
            layer,
            RowsKey(spec.attend_rope, spec.chunk),
            Scoring(spec.scale),
            spec.q_rank or spec.q_size,
            spec.kv_rank,
            spec.rope_dim,
            spec.temperature,
        )


def latent_attention(
    step: LatentStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus latent attention of each row to its sequence."""
    weights = cast(LatentWeights, block.mixer)
    mixed = read_linear(ops, x, weights.norm, weights.qkv)  # [R, q_width + r + p]
    q, latent, key = mixed.split_with_sizes([step.q_width, step.kv_rank, step.rope_dim], -1)
    if weights.q_up is not None:
        q = read_linear(ops, q, weights.q_norm, weights.q_up)  # [R, H * (n + p)]
    factors = state.temperatures.get(step.temperature)
    if factors is not None:
        q = q * factors[:, None]
    h = ops.attend_latent(
        q,
        latent,
        key,
        weights.up,
        batch=state.rows[step.rows],
        cache=state.caches.layer(step.layer),
        scoring=step.scoring,
        norm=weights.kv_norm,
        to=weights.output if weights.post_norm is None else None,
    )  # [R, H * v]
    return add_latent(ops, x, h, block)  # [R, hidden]


def add_latent(ops: LayerOps, x: Tensor, h: Inputs, block: BlockWeights) -> Tensor:
    """x [R, hidden] plus the output of latent attention, for inputs h [R, H * v] of its last
    matrix."""
    weights = cast(LatentWeights, block.mixer)
    return add_output(ops, x, h, weights.output, weights.post_norm)
