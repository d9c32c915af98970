"""Elementwise ops: norms, RoPE and gated activations."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

GateKind = Literal["silu", "gelu_tanh"]


class ElementwiseOps(Protocol):
    """Ops on rows of activations, each element or head by itself."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [m, d] strided rows -> x / sqrt(mean(x^2) + eps) * weight [m, d]."""
        ...

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """RMSNorm of each head by itself, in place; x [rows, heads, d] strided rows."""
        ...

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """RoPE in place; x [rows, heads, d] strided rows.

        cos, sin [rows, r/2] rotate the pairs (i, i + r/2) of each head.
        """
        ...

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        """gate_up [m, 2d] strided rows -> act(first half) * second half [m, d]."""
        ...
