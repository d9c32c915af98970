"""Mamba-2: projections, convolution, state scan, gated norm.

Dimensions: R rows, C channels of the convolution, I inputs of the state, H heads.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from exl_core.arch.layers import Mamba2
from exl_core.model.layers.residual import add_gated, read_linear
from exl_core.model.layers.state import PassState, convolved
from exl_core.model.weights import BlockWeights, Mamba2Weights
from exl_core.ops.table import LayerOps


class Mamba2Step(NamedTuple):
    """Numbers of one layer's Mamba-2, the same in every pass. `widths` are those of the packed
    projection: gate, channels, steps."""

    layer: int
    widths: tuple[int, int, int]

    @classmethod
    def of(cls, layer: int, spec: Mamba2) -> Mamba2Step:
        return cls(layer, (spec.size, spec.channels, spec.heads))


def mamba2(
    step: Mamba2Step, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus the output of Mamba-2 for each row's own sequence."""
    weights = cast(Mamba2Weights, block.mixer)
    held, rows = state.recurrent.layer(step.layer), state.state_rows
    wide = read_linear(ops, x, weights.norm, weights.wide)  # [R, I + C + H]
    gate, xbc, dt = wide.split_with_sizes(step.widths, -1)
    xbc, conv = convolved(ops, xbc, weights.taps, held.inputs, rows)  # [R, C]
    y = ops.state_scan(xbc, dt, weights.scan, held.states, rows, conv=conv)  # [R, I]
    return add_gated(ops, x, y, gate, block)
