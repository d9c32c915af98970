"""Mixture of experts of the autograd backend: each expert computes the rows that chose it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.autograd.linear import AutogradProductOps, RoleMatrices
from exl_core.ops.backends.composed import ComposedExpertOps
from exl_core.ops.backends.routing import StackedExperts, choose
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, Routed, Routing


class AutogradRoutedOps(ComposedExpertOps):
    """RoutedOps for states [R, T, hidden]. Rows are the R * T tokens, one sequence after the
    other. An expert that no row chose is not computed."""

    @staticmethod
    def route(x: Tensor, w: PackedLinear, routing: Routing, bias: Tensor | None = None) -> Routed:
        (logits,) = cast(RoleMatrices, w).outputs(x)
        return choose(logits.float().flatten(0, -2), routing, bias)

    @staticmethod
    def expert_mlp(x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        down = cast(StackedExperts, experts.down).experts
        states = x.flatten(0, -2)  # [m, hidden]
        y = torch.zeros(states.shape, device=x.device)
        for expert in torch.unique(routed.ids).tolist():
            rows, slots = (routed.ids == expert).nonzero(as_tuple=True)
            h = expert_inner(states[rows], experts, expert)
            part = AutogradProductOps.linear(h, down[expert]).float()
            y.index_add_(0, rows, part * routed.weights[rows, slots, None])
        return y.view(x.shape)


def expert_inner(x: Tensor, experts: ExpertMlp, expert: int) -> Tensor:
    """Inputs [m, i] of the expert's matrix `down`, for inputs x [m, hidden] of the expert."""
    gate_up = cast(StackedExperts, experts.gate_up).experts[expert]
    wide = AutogradProductOps.linear(x, gate_up)
    if experts.is_gated:
        return AutogradProductOps.gated_activation(wide, experts.gate)
    return AutogradProductOps.activation(wide, experts.activation)
