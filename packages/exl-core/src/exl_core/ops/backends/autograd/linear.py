"""Products of the autograd backend: a caller's function multiplies, matrix by matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from exl_core.ops.backends.composed import ComposedGateOps, clamped_swiglu
from exl_core.ops.elementwise import ActivationKind, GateKind, LayerNorm, Norm, RmsNorm, XIelu
from exl_core.ops.linear import Inputs, PackedLinear

Product = Callable[[str, Tensor], Tensor]
"""Takes a matrix's key (`q`, `expert_up.3`, as in the module table) and its inputs
[..., in_features]. Returns its outputs [..., out_features], bias included, in the float type in
which it computes."""


@dataclass(frozen=True, slots=True, eq=False)
class RoleMatrices:
    """Matrices with the same inputs, whose outputs are side by side; `roles` are their keys,
    `sizes` the outputs of each. `product` holds the values, and may read the inputs, replace the
    matrices, or raise."""

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    product: Product

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    @property
    def size_bytes(self) -> int:
        return 0

    def outputs(self, x: Tensor) -> list[Tensor]:
        return [self.product(role, x) for role in self.roles]


class AutogradProductOps(ComposedGateOps):
    """ProductOps and RowOps in plain torch, out of place."""

    @staticmethod
    def linear(x: Tensor, w: PackedLinear) -> Tensor:
        parts = cast(RoleMatrices, w).outputs(x)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    def inputs_for(w: PackedLinear, plain: Tensor) -> Tensor:  # noqa: ARG004
        return plain

    @classmethod
    def linear_add_(cls, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        return residual + cls.linear(cast(Tensor, x), w)

    @classmethod
    def norm_linear(
        cls,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        out: Tensor | None = None,  # noqa: ARG003 - out of place
    ) -> Tensor:
        return cls.linear(cls._normed(x, norm), w)

    @classmethod
    def norm_gated_linear(
        cls,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: GateKind,
        out: Inputs | None = None,  # noqa: ARG003 - out of place
    ) -> Tensor:
        gate, up = cast(RoleMatrices, w).outputs(cls._normed(x, norm))
        return _gated(gate, up, kind)

    @classmethod
    def norm_activated_linear(
        cls,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: ActivationKind,
        out: Inputs | None = None,  # noqa: ARG003 - out of place
    ) -> Tensor:
        return cls.activation(cls.norm_linear(x, norm, w), kind)

    @classmethod
    def _normed(cls, x: Tensor, norm: Norm) -> Tensor:
        return cls.rms_norm(x, norm) if isinstance(norm, RmsNorm) else cls.layer_norm(x, norm)

    @staticmethod
    def rms_norm(x: Tensor, norm: RmsNorm) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight

    @staticmethod
    def layer_norm(x: Tensor, norm: LayerNorm) -> Tensor:
        return layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.eps)

    @staticmethod
    def activation(x: Tensor, kind: ActivationKind) -> Tensor:
        if isinstance(kind, XIelu):
            below = kind.alpha_n * (torch.expm1(x.clamp(max=kind.eps)) - x)
            return torch.where(x > 0, kind.alpha_p * x * x, below) + kind.beta * x
        return relu(x).square() if kind == "relu2" else _activated(x, kind)

    @staticmethod
    def gated_activation(gate_up: Tensor, kind: GateKind) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return _gated(gate, up, kind)

    @staticmethod
    def add_(residual: Tensor, y: Tensor) -> Tensor:
        return residual + y


def _gated(gate: Tensor, up: Tensor, kind: GateKind) -> Tensor:
    return clamped_swiglu(gate, up) if kind == "clamped_swiglu" else _activated(gate, kind) * up


def _activated(x: Tensor, kind: Literal["silu", "gelu_tanh"]) -> Tensor:
    return silu(x) if kind == "silu" else gelu(x, approximate="tanh")
