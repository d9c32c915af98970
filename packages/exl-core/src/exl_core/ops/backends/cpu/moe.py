"""Mixture of experts of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.checks import check_range
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, PackedExperts, Routed, Routing


class CpuMoeOps:
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
        if not experts.is_gated or not exl_kernels.has_expert_kernel(gate_up, down):
            return self._one_by_one(x, routed, experts)
        out = torch.empty(x.shape[0], down.out_features)
        self._ops.expert_mlp(x, routed.ids, routed.weights, gate_up, down, experts.gate, out)
        return out

    def _one_by_one(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        """Experts that are dense, have codes of floats or no gate: each with the kernels of a
        linear."""
        gate_up = cast(exl_kernels.Experts, experts.gate_up).experts
        down = cast(exl_kernels.Experts, experts.down).experts
        ids, weights = routed.ids, routed.weights
        check_range("expert_mlp", "ids", ids, len(down))
        parts = torch.empty(*ids.shape, x.shape[1])  # [m, k, d]
        for expert in sorted(set(ids.flatten().tolist())):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            wide = self._product(x[rows], gate_up[expert])
            if experts.is_gated:
                h = torch.empty(len(rows), wide.shape[1] // 2)
                self._ops.gated_activation(wide, experts.gate, h)
            else:
                h = torch.empty(wide.shape)
                self._ops.activation(wide, cast(str, experts.activation), h)
            parts[rows, slots] = self._product(h, down[expert])
        y = parts[:, 0] * weights[:, :1]
        for slot in range(1, ids.shape[1]):
            y.addcmul_(parts[:, slot], weights[:, slot, None])
        return y

    def _product(self, x: Tensor, w: exl_kernels.Linear) -> Tensor:
        out = torch.empty(x.shape[0], w.out_features)
        self._ops.linear(x, w, out)
        return out
