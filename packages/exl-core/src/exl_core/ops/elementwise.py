"""Elementwise ops: norms, RoPE and gated activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

GateKind = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""Gated activation of a gate g and a value u: act(g) * u, or for `clamped_swiglu` (gpt-oss)
g * sigmoid(SWIGLU_ALPHA * g) * (u + 1), with g at most SWIGLU_LIMIT and u within +-SWIGLU_LIMIT."""
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


@dataclass(frozen=True, slots=True)
class XIelu:
    """Numbers of the activation xIELU (arXiv 2411.13010):
    alpha_p * x^2 + beta * x                                for x > 0,
    alpha_n * (expm1(min(x, eps)) - x) + beta * x           otherwise."""

    alpha_p: float
    alpha_n: float
    beta: float = 0.5
    eps: float = -1e-6


ActivationKind = Literal["silu", "gelu_tanh", "relu2"] | XIelu


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """Factors of an RMS norm, float32 [d], and the number that is added to the mean square.

    A model builds each of its norms once, at load.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Factors and, if not None, bias of a LayerNorm, float32 [d], and the number that is added to
    the variance."""

    weight: Tensor
    bias: Tensor | None
    eps: float


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True, eq=False)
class Gating:
    """How heads of `head_dim` values are multiplied by their gates.

    kind           activation of the gates
    norm           RMSNorm of each head, or None; its factors are those of one head, or of all
    is_gate_first  the norm follows the product, instead of preceding it
    """

    kind: Literal["silu", "sigmoid"]
    head_dim: int
    norm: RmsNorm | None = None
    is_gate_first: bool = False


class RowOps(Protocol):
    """Ops on rows of states, as the layers call them."""

    def rms_norm(self, x: Tensor, norm: RmsNorm) -> Tensor:
        """x [m, d] strided rows -> x / sqrt(mean(x^2) + norm.eps) * norm.weight [m, d]."""
        ...

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """x [m, d] strided rows -> (x - mean) / sqrt(variance + norm.eps) * norm.weight + norm.bias
        [m, d], with the population variance of each row."""
        ...

    def activation(self, x: Tensor, kind: ActivationKind) -> Tensor:
        """x [m, d] strided rows -> act(x) [m, d]. relu2: max(x, 0)^2."""
        ...

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        """gate_up [m, 2d] strided rows -> act(first half) * second half [m, d], by `GateKind`."""
        ...

    def add_(self, residual: Tensor, y: Tensor) -> Tensor:
        """residual [m, d] += y [m, d]; returns the sum, here `residual` itself."""
        ...


class ElementwiseOps(RowOps, Protocol):
    """Ops on rows of activations, each element or head by itself."""

    def rms_norm_heads_(self, x: Tensor, norm: RmsNorm) -> None:
        """RMSNorm of each head by itself, in place; x [rows, heads, d] strided rows."""
        ...

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """RoPE in place; x [rows, heads, d] strided rows.

        cos, sin [rows, r/2] rotate the pairs (i, i + r/2) of each head.
        """
        ...
