"""Mixture of experts of the autograd backend: refused, as no conversion computes experts yet."""

from __future__ import annotations

from torch import Tensor

from exl_core.errors import UnsupportedModelError
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, Routed, Routing


class AutogradRoutedOps:
    """RoutedOps that raise UnsupportedModelError."""

    @staticmethod
    def route(
        x: Tensor,  # noqa: ARG004
        w: PackedLinear,
        routing: Routing,  # noqa: ARG004
        bias: Tensor | None = None,  # noqa: ARG004
    ) -> Routed:
        raise UnsupportedModelError("routers cannot be converted", got=f"{w.out_features} experts")

    @staticmethod
    def expert_mlp(x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:  # noqa: ARG004
        count = experts.down.num_experts
        raise UnsupportedModelError("experts cannot be converted", got=f"{count} experts")
