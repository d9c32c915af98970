"""Mixture of experts of the reference table: row by row, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.composed import ComposedExpertOps
from exl_core.ops.backends.reference.elementwise import ReferenceElementwiseOps
from exl_core.ops.backends.reference.linear import ReferenceLinearOps
from exl_core.ops.backends.routing import StackedExperts
from exl_core.ops.checks import F32, OpInputError, check, check_contiguous, check_range
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, PackedExperts, Routed, Routing


class ReferenceMoeOps(ComposedExpertOps):
    """MoeOps in plain torch."""

    @staticmethod
    def stack(experts: Sequence[PackedLinear]) -> PackedExperts:
        return StackedExperts.of(experts)

    @staticmethod
    def route(x: Tensor, w: PackedLinear, routing: Routing, bias: Tensor | None = None) -> Routed:
        check_routing(w.out_features, routing)
        if bias is not None:
            check("route", "bias", bias, F32, w.out_features)
        logits = ReferenceLinearOps.linear(x, w)
        chosen = [_choose(row, routing, bias) for row in logits]
        shape = len(logits), routing.top_k
        ids = torch.tensor([ids for ids, _ in chosen], dtype=torch.int32).view(shape)
        return Routed(ids, torch.tensor([weights for _, weights in chosen]).view(shape))

    @staticmethod
    def expert_mlp(x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        gate_up = cast(StackedExperts, experts.gate_up)
        down = cast(StackedExperts, experts.down)
        check("expert_mlp", "x", x, F32, None, gate_up.in_features)
        check("expert_mlp", "ids", routed.ids, (torch.int32,), x.shape[0], None)
        check("expert_mlp", "weights", routed.weights, F32, *routed.ids.shape)
        check_contiguous("expert_mlp", "ids", routed.ids)
        check_range("expert_mlp", "ids", routed.ids.flatten().long(), gate_up.num_experts)
        y = torch.zeros(len(x), down.out_features, dtype=torch.float64)
        for expert in sorted(set(routed.ids.flatten().tolist())):
            rows, slots = (routed.ids == expert).nonzero(as_tuple=True)
            h = ReferenceLinearOps.linear(x[rows], gate_up.experts[expert])
            if experts.is_gated:
                h = ReferenceElementwiseOps.gated_activation(h, experts.gate)
            else:
                h = ReferenceElementwiseOps.activation(h, experts.activation)
            part = ReferenceLinearOps.linear(h, down.experts[expert]).double()
            y.index_add_(0, rows, part * routed.weights[rows, slots, None])
        return y.float()


def check_routing(num_experts: int, routing: Routing) -> None:
    size, rest = divmod(num_experts, routing.groups)
    if rest or not 1 <= routing.top_k <= routing.kept_groups * size <= num_experts:
        raise OpInputError(f"route: {routing} (expected one for {num_experts} experts)")


def _choose(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[list[int], list[float]]:
    """Experts of one row, and their weights."""
    wide = logits.double()
    scores = (wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()).float().tolist()
    ranked = scores if bias is None else (torch.tensor(scores) + bias).tolist()
    size = len(scores) // routing.groups

    def group_score(group: int) -> float:
        best = sorted(ranked[group * size : (group + 1) * size], reverse=True)
        return math.fsum(best[: routing.group_scores])

    # Sorting is stable: of equal scores, the lower index comes first.
    groups = sorted(range(routing.groups), key=group_score, reverse=True)[: routing.kept_groups]
    allowed = [expert for expert in range(len(scores)) if expert // size in groups]
    ids = sorted(allowed, key=ranked.__getitem__, reverse=True)[: routing.top_k]
    weights = [scores[expert] for expert in ids]
    if routing.normalizes:
        total = math.fsum(weights) + routing.eps
        weights = [weight / total for weight in weights]
    return ids, [weight * routing.factor for weight in weights]
