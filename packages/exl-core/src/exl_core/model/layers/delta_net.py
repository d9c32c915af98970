"""Gated delta net (Qwen3-Next, Qwen3.5), and that of Kimi-Linear, whose states decay row by row:
projections, convolution, delta rule, gated norm.

Dimensions: R rows, C channels of the convolution, H value heads, V elements of each.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.arch.layers import GatedDeltaNet, KimiDeltaNet
from exl_core.model.layers.residual import add_gated, read_linear
from exl_core.model.layers.state import PassState, convolved
from exl_core.model.weights import BlockWeights, DeltaNetWeights, KimiDeltaWeights
from exl_core.ops.table import LayerOps


class DeltaNetStep(NamedTuple):
    """Numbers of one layer's delta net, the same in every pass. `widths` are those of the packed
    projection: channels, gate, and the two numbers of each head."""

    layer: int
    widths: tuple[int, int, int]

    @classmethod
    def of(cls, layer: int, spec: GatedDeltaNet) -> DeltaNetStep:
        widths = spec.channels, spec.value_size, 2 * spec.value_heads
        return cls(layer, widths)


def delta_net(
    step: DeltaNetStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus the output of the delta net for each row's own sequence."""
    weights = cast(DeltaNetWeights, block.mixer)
    held, rows = state.recurrent.layer(step.layer), state.state_rows
    wide = read_linear(ops, x, weights.norm, weights.wide)  # [R, C + H * V + 2 * H]
    qkv, gate, ba = wide.split_with_sizes(step.widths, -1)
    qkv, conv = convolved(ops, qkv, weights.taps, held.inputs, rows)  # [R, C]
    y = ops.delta_rule(qkv, ba, weights.rule, held.states, rows, conv=conv)  # [R, H * V]
    return add_gated(ops, x, y, gate, block)


class KimiDeltaStep(NamedTuple):
    """Numbers of one layer's delta net, the same in every pass. `widths` are those of the packed
    projection: channels, inner vectors of decays and gates, and the number of each head."""

    layer: int
    widths: tuple[int, int, int, int]

    @classmethod
    def of(cls, layer: int, spec: KimiDeltaNet) -> KimiDeltaStep:
        widths = 3 * spec.size, spec.head_dim, spec.head_dim, spec.heads
        return cls(layer, widths)


def kimi_delta(
    step: KimiDeltaStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus the output of the delta net for each row's own sequence."""
    weights = cast(KimiDeltaWeights, block.mixer)
    held, rows = state.recurrent.layer(step.layer), state.state_rows
    wide = read_linear(ops, x, weights.norm, weights.wide)  # [R, 3 * H * V + 2 * V + H]
    qkv, inner_a, inner_z, b = wide.split_with_sizes(step.widths, -1)
    qkv, conv = convolved(ops, qkv, weights.taps, held.inputs, rows)  # [R, 3 * H * V]
    a = ops.linear(inner_a, weights.decay_up)  # [R, H * V]
    gate = ops.linear(inner_z, weights.gate_up)  # [R, H * V]
    ba = torch.cat([b.to(a.dtype), a], -1)
    y = ops.delta_rule(qkv, ba, weights.rule, held.states, rows, conv=conv)  # [R, H * V]
    return add_gated(ops, x, y, gate, block)
