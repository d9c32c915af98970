"""A layer whose attention and MLP read the same normed states."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from exl_core.model.layers.attention import AttentionStep, attended
from exl_core.model.layers.mlp import MlpStep, widened
from exl_core.model.layers.residual import add_output, normed
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
    states = normed(ops, x, norm)  # [R, hidden]
    h = attended(steps[0], ops, states, block, state, norm=None)
    x = add_output(ops, x, h, block.attention.output, None)
    h = widened(steps[1], ops, states, block, state, norm=None)
    return add_output(ops, x, h, cast(MlpWeights, block.mlp).down, None)
