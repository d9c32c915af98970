"""A layer whose attention and MLP read the same normed states."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from exl_core.model.layers.attention import AttentionStep, attended
from exl_core.model.layers.mlp import MlpStep, widened
from exl_core.model.layers.residual import add_output
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights, MlpWeights
from exl_core.ops.table import LayerOps


def parallel(
    steps: tuple[AttentionStep, MlpStep],
    ops: LayerOps,
    x: Tensor,
    block: BlockWeights,
    state: PassState,
) -> Tensor:
    """x [R, hidden] plus attention(norm(x)) plus mlp(norm(x))."""
    norm = block.attention.norm
    assert norm is not None, "a parallel layer has a norm"
    # Both parts read the states before either adds to them, each through its fused norm.
    heads = attended(steps[0], ops, x, block, state, norm=norm)  # [R, H * D]
    inner = widened(steps[1], ops, x, block, state, norm=norm)  # [R, intermediate]
    x = add_output(ops, x, heads, block.attention.output, None)
    return add_output(ops, x, inner, cast(MlpWeights, block.mlp).down, None)
