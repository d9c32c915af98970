"""A mixture of experts, with its router, its shared expert and its norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.arch.layers import MoE, Router
from exl_core.model.layers.mlp import ACTIVATIONS, GATES
from exl_core.model.layers.residual import (
    add_output,
    gated_inputs,
    inputs_buffer,
    normed,
    read_activated_linear,
    read_gated_linear,
    read_linear,
)
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights, MlpWeights, MoeWeights
from exl_core.ops.elementwise import ActivationKind, GateKind, Gating, RmsNorm
from exl_core.ops.linear import Inputs
from exl_core.ops.moe import ExpertLayer, Routed, Routing
from exl_core.ops.table import LayerOps


class MoeStep(NamedTuple):
    """Choices of one layer's experts, the same in every pass. Either `gate` or `activation` is
    None."""

    layer: int
    routing: Routing
    gate: GateKind | None
    activation: ActivationKind | None
    weighs_inputs: bool

    @classmethod
    def of(cls, layer: int, spec: MoE) -> MoeStep:
        routing = routing_of(spec.router)
        gate = GATES[spec.activation] if spec.is_gated else None
        activation = None if spec.is_gated else ACTIVATIONS[spec.activation]
        return cls(layer, routing, gate, activation, spec.weighs_inputs)


def routing_of(router: Router) -> Routing:
    return Routing(
        top_k=router.top_k,
        scores=router.scores.value,
        groups=router.groups,
        kept_groups=router.kept_groups,
        group_scores=router.group_scores,
        normalizes=router.normalizes,
        eps=router.eps,
        factor=router.factor,
    )


def moe(step: MoeStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState) -> Tensor:
    """x [R, hidden] plus the weighted outputs of each row's experts, times the factor of the
    layer."""
    weights = cast(MoeWeights, block.mlp)
    if isinstance(weights.norm, RmsNorm) and not step.weighs_inputs and weights.is_plain:
        x = _plain_moe(step, ops, x, weights, state)
        return x if block.scalar is None else x * block.scalar
    h = x if weights.norm is None else normed(ops, x, weights.norm)  # [R, hidden]
    scored = h if weights.router_norm is None else normed(ops, x, weights.router_norm)
    inputs = h if weights.expert_norm is None else normed(ops, x, weights.expert_norm)
    routed = ops.route(scored, weights.router, step.routing, weights.router_bias)  # [R, k] each
    if weights.expert_factors is not None:
        factors = weights.expert_factors[routed.ids.long()]  # [R, k]
        routed = Routed(routed.ids, routed.weights * factors)
    if weights.latent_down is not None:
        inputs = ops.linear(inputs, weights.latent_down)  # [R, latent]
    finish = _start_experts(step, ops, inputs, routed, weights)
    shared = None
    if weights.shared is not None:  # while experts on another device are computed
        shared = _shared_inner(step, ops, h, weights.shared)  # [R, inner]
    y = finish()  # [R, hidden or latent]
    if weights.latent_up is not None:
        y = ops.linear(y, weights.latent_up)  # [R, hidden]
    if weights.expert_post_norm is not None:
        y = normed(ops, y, weights.expert_post_norm)
    if shared is not None:
        y = _add_shared(ops, h, shared, y, weights)
    if weights.post_norm is not None:
        y = normed(ops, y, weights.post_norm)
    x = ops.add_(x, y)
    return x if block.scalar is None else x * block.scalar


def _plain_moe(
    step: MoeStep, ops: LayerOps, x: Tensor, weights: MoeWeights, state: PassState
) -> Tensor:
    """x [R, hidden] plus the outputs of the experts, and then those of the shared expert. All read
    norm(x)."""
    norm, router, bias = cast(RmsNorm, weights.norm), weights.router, weights.router_bias
    if weights.joined is not None and ops.joins_experts(x.shape[0]):
        layer = ExpertLayer(norm, router, step.routing, bias, weights.experts, weights.joined)
        return ops.add_experts_(x, layer)
    if weights.host is None:
        inputs = _shared_inputs(step, ops, x, weights, state)  # before x is changed
        layer = ExpertLayer(norm, router, step.routing, bias, weights.experts)
        x = ops.add_experts_(x, layer)
    else:
        h = ops.rms_norm(x, norm)  # [R, hidden]
        routed = ops.route(h, router, step.routing, bias)
        finish = weights.host.start(h, routed, weights.experts)
        inputs = _shared_inputs(step, ops, x, weights, state)  # meanwhile
        x = ops.add_(x, finish())
    if weights.shared is None or inputs is None:
        return x
    return ops.linear_add_(inputs, weights.shared.down, x)


def _shared_inputs(
    step: MoeStep, ops: LayerOps, x: Tensor, weights: MoeWeights, state: PassState
) -> Inputs | None:
    """Inputs of the shared expert's `down` [R, intermediate], times its scores if there are scores,
    for states x [R, hidden]. None if there is no shared expert."""
    shared, norm, router = weights.shared, weights.norm, weights.shared_router
    if shared is None:
        return None
    plain = state.buffers[step.layer].gated
    out: Inputs = plain if router is not None else inputs_buffer(ops, shared.down, plain, None)
    if step.gate is not None:
        inner = read_gated_linear(ops, x, norm, shared.gate_up, step.gate, out=out)
    else:
        assert step.activation is not None, "one of the two is there"
        inner = read_activated_linear(ops, x, norm, shared.gate_up, step.activation, out=out)
    if router is None:
        return inner
    scores = read_linear(ops, x, norm, router)  # [R, 1]
    gating = Gating("sigmoid", shared.down.in_features)
    return gated_inputs(ops, cast(Tensor, inner), scores, gating, shared.down, post_norm=None)


def _start_experts(
    step: MoeStep, ops: LayerOps, x: Tensor, routed: Routed, weights: MoeWeights
) -> Callable[[], Tensor]:
    """Starts the experts of each row. The returned function returns the sum of their outputs
    [R, hidden], with the weights on the side that the family has them."""
    if not step.weighs_inputs:
        return _start(ops, x, routed, weights)
    rows, count = routed.weights.shape
    # The autograd backend has sequences of rows.
    states = x.view(rows, -1)
    weighed = (states[:, None] * routed.weights[..., None]).flatten(0, 1)  # [R * k, hidden]
    each = Routed(routed.ids.view(-1, 1), torch.ones_like(routed.weights).view(-1, 1))
    finish = _start(ops, weighed, each, weights)
    return lambda: finish().view(rows, count, -1).sum(1).view(x.shape)


def _start(ops: LayerOps, x: Tensor, routed: Routed, weights: MoeWeights) -> Callable[[], Tensor]:
    """`expert_mlp` where the experts are: on the device of the layer, or on the host."""
    if weights.host is not None:
        return weights.host.start(x, routed, weights.experts)
    y = ops.expert_mlp(x, routed, weights.experts)
    return lambda: y


def _shared_inner(step: MoeStep, ops: LayerOps, h: Tensor, shared: MlpWeights) -> Inputs:
    """The shared expert up to the inputs of its `down`, [R, intermediate]."""
    if step.gate is not None:
        return read_gated_linear(ops, h, None, shared.gate_up, step.gate)
    assert step.activation is not None, "one of the two is there"
    return read_activated_linear(ops, h, None, shared.gate_up, step.activation)


def _add_shared(ops: LayerOps, h: Tensor, inner: Inputs, y: Tensor, weights: MoeWeights) -> Tensor:
    """y [R, hidden] plus the shared expert's outputs, each row times its score if there are scores.
    h [R, hidden] are the inputs of the expert, and `inner` [R, intermediate] those of `down`."""
    shared = weights.shared
    assert shared is not None, "the caller has checked it"
    if weights.shared_router is None:
        return add_output(ops, y, inner, shared.down, shared.post_norm)
    scores = torch.sigmoid(ops.linear(h, weights.shared_router))  # [R, 1]
    return ops.add_(y, ops.linear(cast(Tensor, inner), shared.down) * scores)
