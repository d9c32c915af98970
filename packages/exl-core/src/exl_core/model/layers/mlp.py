"""The MLP, gated or not, with its norms."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from exl_core.arch.layers import Activation, Dense
from exl_core.model.layers.residual import (
    add_output,
    inputs_buffer,
    read_activated_linear,
    read_gated_linear,
)
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights, MlpWeights
from exl_core.ops.elementwise import ActivationKind, GateKind, Norm
from exl_core.ops.linear import Inputs
from exl_core.ops.table import LayerOps

ACTIVATIONS: dict[Activation, ActivationKind] = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
    Activation.RELU2: "relu2",
}
GATES: dict[Activation, GateKind] = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
    Activation.CLAMPED_SWIGLU: "clamped_swiglu",
}


class MlpStep(NamedTuple):
    """Choices of one layer's MLP, the same in every pass. `gate` is None for an MLP without one,
    `activation` for one with numbers of its own."""

    layer: int
    activation: ActivationKind | None
    gate: GateKind | None

    @classmethod
    def of(cls, layer: int, spec: Dense) -> MlpStep:
        gate = GATES[spec.activation] if spec.is_gated else None
        return cls(layer, ACTIVATIONS.get(spec.activation), gate)


def mlp(step: MlpStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState) -> Tensor:
    """x [R, hidden] plus down(activation(gate) * up), times the factor of the layer."""
    weights = cast(MlpWeights, block.mlp)
    h = widened(step, ops, x, block, state, norm=weights.norm)  # [R, intermediate]
    return add_widened(ops, x, h, block)  # [R, hidden]


def add_widened(ops: LayerOps, x: Tensor, h: Inputs, block: BlockWeights) -> Tensor:
    """The states after the MLP, for those before it and inputs h [R, intermediate] of `down`."""
    weights = cast(MlpWeights, block.mlp)
    x = add_output(ops, x, h, weights.down, weights.post_norm)
    return x if block.scalar is None else x * block.scalar


def widened(
    step: MlpStep,
    ops: LayerOps,
    x: Tensor,
    block: BlockWeights,
    state: PassState,
    *,
    norm: Norm | None,
) -> Inputs:
    """Inputs of the matrix `down` [R, intermediate], for states x [R, hidden] before `norm`."""
    weights = cast(MlpWeights, block.mlp)
    out = inputs_buffer(ops, weights.down, state.buffers[step.layer].gated, weights.post_norm)
    if step.gate is None:
        kind = step.activation or weights.xielu
        assert kind is not None, "an activation with numbers of its own has them"
        return read_activated_linear(ops, x, norm, weights.gate_up, kind, out=out)
    return read_gated_linear(ops, x, norm, weights.gate_up, step.gate, out=out)
