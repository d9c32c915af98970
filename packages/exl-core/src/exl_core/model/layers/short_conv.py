"""LFM2's short convolution: a gated convolution over the last tokens, with its projections.

Dimensions: R rows, C channels.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from exl_core.arch.layers import ShortConv
from exl_core.model.layers.residual import add_mixed, read_linear
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights, ShortConvWeights
from exl_core.ops.table import LayerOps


class ShortConvStep(NamedTuple):
    """Numbers of one layer's convolution, the same in every pass."""

    layer: int
    size: int

    @classmethod
    def of(cls, layer: int, spec: ShortConv) -> ShortConvStep:
        return cls(layer, spec.size)


def short_conv(
    step: ShortConvStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus out(c * conv(b * x)) of each row's own sequence."""
    weights = cast(ShortConvWeights, block.mixer)
    wide = read_linear(ops, x, weights.norm, weights.wide)  # [R, 3 * C]
    b, c, inputs = wide.split_with_sizes([step.size] * 3, -1)  # [R, C] each
    held = state.recurrent.layer(step.layer)
    y = ops.causal_conv(b * inputs, weights.taps, held.inputs, state.state_rows)  # [R, C]
    return add_mixed(ops, x, c * y, block)
