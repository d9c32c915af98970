"""Mixture of experts of one GPU, without synchronization: captured graphs may contain it.

The host does not know which experts the rows use. Every expert is computed for all rows, and the
outputs of the experts that a row does not use are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from exl_core.ops.backends.routing import StackedExperts, choose
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, PackedExperts, Routed, Routing

if TYPE_CHECKING:
    from exl_core.ops.table import OpTable


class CudaMoeOps:
    """MoeOps of one GPU."""

    @staticmethod
    def stack(experts: Sequence[PackedLinear]) -> PackedExperts:
        return StackedExperts.of(experts)

    def route(
        self: OpTable, x: Tensor, w: PackedLinear, routing: Routing, bias: Tensor | None = None
    ) -> Routed:
        return choose(self.linear(x, w), routing, bias)

    def expert_mlp(self: OpTable, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        gate_up = cast(StackedExperts, experts.gate_up).experts
        down = cast(StackedExperts, experts.down).experts
        weights = x.new_zeros(len(x), len(down), dtype=torch.float32)
        weights.scatter_(1, routed.ids.long(), routed.weights)  # [m, E]
        y = x.new_zeros(len(x), down[0].out_features, dtype=torch.float32)
        for expert, (wide, narrow) in enumerate(zip(gate_up, down, strict=True)):
            h = self.gated_activation(self.linear(x, wide), experts.kind)
            weight = weights[:, expert, None]
            # An output of infinity times a weight of zero would be NaN.
            y += torch.where(weight == 0, 0.0, self.linear(h, narrow) * weight)
        return y
