"""Ops that backends compute with torch, on their own device, or with other ops.

Few families need these activations, and they take a small part of a layer's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from exl_core.ops.elementwise import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Gating,
    RmsNorm,
    RowOps,
    XIelu,
)
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertLayer, ExpertMlp, JoinedExperts, RoutedOps

VECTORS = 64
"""Elements; a multiple of every vector width of torch's loops."""

ONE_THREAD = 1 << 15
"""Elements that one thread of torch computes; more are divided among several."""


class _Ops(RowOps, RoutedOps, Protocol): ...


def by_vectors(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies the elementwise `op` to x. The result of an element does not depend on its index.
    torch uses scalar code for the tail of each thread's range, which rounds differently."""
    if x.device.type != "cpu":
        return op(x)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % VECTORS))
    parts = [op(part) for part in torch.split(flat, ONE_THREAD)]
    return torch.cat(parts)[: x.numel()].view(x.shape)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gated activation of every element, in the type of the operands."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def xielu(x: Tensor, numbers: XIelu) -> Tensor:
    """xIELU of every element, in the type of x."""
    low = torch.expm1(x.clamp(max=numbers.eps)) - x
    return torch.where(x > 0, numbers.alpha_p * x * x, numbers.alpha_n * low) + numbers.beta * x


class ComposedGateOps:
    """`RowOps.gate_heads` by the table's RMSNorm and torch."""

    def gate_heads(
        self: RowOps,
        x: Tensor,
        gate: Tensor,
        gating: Gating,
        to: PackedLinear | None = None,  # noqa: ARG002 - all matrices take tensors
    ) -> Tensor:
        gate = gate.to(x.dtype)
        kind = torch.sigmoid if gating.kind == "sigmoid" else torch.nn.functional.silu
        act = by_vectors(kind, gate)
        norm = gating.norm
        if norm is None:
            return x * act
        if gating.is_gate_first:
            x = x * act
        heads = x.reshape(-1, gating.head_dim)  # [m * heads, head_dim]
        if len(norm.weight) == gating.head_dim:
            y = self.rms_norm(heads, norm).view(x.shape)
        else:
            plain = RmsNorm(torch.ones(gating.head_dim, device=x.device), norm.eps)
            y = self.rms_norm(heads, plain).view(x.shape) * norm.weight
        return y if gating.is_gate_first else y * act


class ComposedExpertOps:
    """`RoutedOps.add_experts_` by other ops of the table. A shared expert is not joined."""

    @staticmethod
    def join_experts(
        experts: ExpertMlp,  # noqa: ARG004 - as below
        gate_up: PackedLinear,  # noqa: ARG004
        down: PackedLinear,  # noqa: ARG004
        scores: PackedLinear | None,  # noqa: ARG004
    ) -> JoinedExperts | None:
        return None

    def joins_experts(self, rows: int) -> bool:  # noqa: ARG002 - no number of rows is
        return False

    def add_experts_(self: _Ops, x: Tensor, layer: ExpertLayer) -> Tensor:
        h = self.rms_norm(x, layer.norm)
        routed = self.route(h, layer.router, layer.routing, layer.bias)
        return self.add_(x, self.expert_mlp(h, routed, layer.experts))
