"""Mixture of experts of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.composed import ComposedExpertOps
from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, PackedExperts, Routed, Routing


class CpuMoeOps(ComposedExpertOps):
    """MoeOps of the CPU kernels."""

    _ops: exl_kernels.Table

    @staticmethod
    def stack(experts: Sequence[PackedLinear]) -> PackedExperts:
        return exl_kernels.Experts([cast(exl_kernels.Linear, one) for one in experts])

    def route(
        self, x: Tensor, w: PackedLinear, routing: Routing, bias: Tensor | None = None
    ) -> Routed:
        ids = torch.empty(x.shape[0], routing.top_k, dtype=torch.int32)
        weights = torch.empty(ids.shape)
        self._ops.route(
            self._product(x, cast(exl_kernels.Linear, w)),
            bias,
            routing.scores,
            routing.groups,
            routing.kept_groups,
            routing.group_scores,
            routing.normalizes,
            routing.eps,
            routing.factor,
            ids,
            weights,
        )
        return Routed(ids, weights)

    def expert_mlp(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        gate_up = cast(exl_kernels.Experts, experts.gate_up)
        down = cast(exl_kernels.Experts, experts.down)
        out = torch.empty(x.shape[0], down.out_features)
        kind, is_gated = cast(str, experts.kind), experts.is_gated
        self._ops.expert_mlp(x, routed.ids, routed.weights, gate_up, down, kind, is_gated, out)
        return out

    def expert_call(
        self, x: Tensor, routed: Routed, experts: ExpertMlp, out: Tensor
    ) -> exl_kernels.ExpertCall:
        """`expert_mlp` of the rows that are in these tensors when it runs, as a C function. The
        caller keeps their memory."""
        gate_up = cast(exl_kernels.Experts, experts.gate_up)
        down = cast(exl_kernels.Experts, experts.down)
        kind, is_gated = cast(str, experts.kind), experts.is_gated
        return exl_kernels.ExpertCall(
            self._ops, x, routed.ids, routed.weights, gate_up, down, kind, is_gated, out
        )

    def _product(self, x: Tensor, w: exl_kernels.Linear) -> Tensor:
        out = torch.empty(x.shape[0], w.out_features)
        self._ops.linear(x, w, out)
        return out
