"""The gated MLP, with its norms."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from exl_core.arch.layers import Activation, Dense
from exl_core.model.layers.residual import add_output, inputs_buffer, read_gated_linear
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights
from exl_core.ops.elementwise import GateKind
from exl_core.ops.table import LayerOps

ACTIVATIONS: dict[Activation, GateKind] = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
}


class MlpStep(NamedTuple):
    """Choices of one layer's MLP, the same in every pass."""

    layer: int
    activation: GateKind

    @classmethod
    def of(cls, layer: int, spec: Dense) -> MlpStep:
        return cls(layer, ACTIVATIONS[spec.activation])


def mlp(step: MlpStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState) -> Tensor:
    """x [R, hidden] plus down(activation(gate) * up)."""
    weights, gated = block.mlp, state.buffers[step.layer].gated
    out = inputs_buffer(ops, weights.down, gated, weights.post_norm)

    h = read_gated_linear(
        ops, x, weights.norm, weights.gate_up, step.activation, out=out
    )  # [R, intermediate]
    return add_output(ops, x, h, weights.down, weights.post_norm)  # [R, hidden]
