"""A mixture of experts, with its router, its shared expert and its norms."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.arch.layers import MoE, Router
from exl_core.model.layers.mlp import ACTIVATIONS, GATES
from exl_core.model.layers.residual import (
    add_output,
    normed,
    read_activated_linear,
    read_gated_linear,
)
from exl_core.model.layers.state import PassState
from exl_core.model.weights import BlockWeights, MoeWeights
from exl_core.ops.elementwise import ActivationKind, GateKind
from exl_core.ops.moe import Routed, Routing
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


def moe(step: MoeStep, ops: LayerOps, x: Tensor, block: BlockWeights, state: PassState) -> Tensor:  # noqa: ARG001
    """x [R, hidden] plus the weighted outputs of each row's experts, times the factor of the
    layer."""
    weights = cast(MoeWeights, block.mlp)
    h = x if weights.norm is None else normed(ops, x, weights.norm)  # [R, hidden]
    scored = h if weights.router_norm is None else normed(ops, x, weights.router_norm)
    inputs = h if weights.expert_norm is None else normed(ops, x, weights.expert_norm)
    routed = ops.route(scored, weights.router, step.routing, weights.router_bias)  # [R, k] each
    if weights.expert_factors is not None:
        factors = weights.expert_factors[routed.ids.long()]  # [R, k]
        routed = Routed(routed.ids, routed.weights * factors)
    if weights.latent_down is not None:
        inputs = ops.linear(inputs, weights.latent_down)  # [R, latent]
    y = _experts(step, ops, inputs, routed, weights)  # [R, hidden or latent]
    if weights.latent_up is not None:
        y = ops.linear(y, weights.latent_up)  # [R, hidden]
    if weights.expert_post_norm is not None:
        y = normed(ops, y, weights.expert_post_norm)
    if weights.shared is not None:
        y = _add_shared(step, ops, h, y, weights)
    if weights.post_norm is not None:
        y = normed(ops, y, weights.post_norm)
    x = ops.add_(x, y)
    return x if block.scalar is None else x * block.scalar


def _experts(
    step: MoeStep, ops: LayerOps, x: Tensor, routed: Routed, weights: MoeWeights
) -> Tensor:
    """Sum of the outputs of each row's experts [R, hidden], with the weights on the side that the
    family has them."""
    if not step.weighs_inputs:
        return ops.expert_mlp(x, routed, weights.experts)
    rows, count = routed.weights.shape
    # The autograd backend has sequences of rows.
    states = x.view(rows, -1)
    weighed = (states[:, None] * routed.weights[..., None]).flatten(0, 1)  # [R * k, hidden]
    each = Routed(routed.ids.view(-1, 1), torch.ones_like(routed.weights).view(-1, 1))
    y = ops.expert_mlp(weighed, each, weights.experts).view(rows, count, -1).sum(1)
    return y.view(x.shape)


def _add_shared(step: MoeStep, ops: LayerOps, h: Tensor, y: Tensor, weights: MoeWeights) -> Tensor:
    """y [R, hidden] plus the shared expert's outputs for h [R, hidden], each row times its score if
    there are scores."""
    shared = weights.shared
    assert shared is not None, "the caller has checked it"
    if step.gate is not None:
        inner = read_gated_linear(ops, h, None, shared.gate_up, step.gate)  # [R, intermediate]
    else:
        assert step.activation is not None, "one of the two is there"
        inner = read_activated_linear(ops, h, None, shared.gate_up, step.activation)
    if weights.shared_router is None:
        return add_output(ops, y, inner, shared.down, shared.post_norm)
    scores = torch.sigmoid(ops.linear(h, weights.shared_router))  # [R, 1]
    return ops.add_(y, ops.linear(cast(Tensor, inner), shared.down) * scores)
