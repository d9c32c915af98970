"""Ops that a backend computes with torch, on its own device.

Few families need them, and they take a small part of a layer's time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from exl_core.ops.elementwise import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    ActivationKind,
    LayerNorm,
    XIelu,
)


class ComposedOps:
    """Norms and activations of families other than Llama's, in float32."""

    @staticmethod
    def layer_norm(x: Tensor, norm: LayerNorm) -> Tensor:
        wide = x.to(torch.float32)
        return functional.layer_norm(wide, wide.shape[-1:], norm.weight, norm.bias, norm.eps)

    @staticmethod
    def activation(x: Tensor, kind: ActivationKind) -> Tensor:
        match kind:
            case "relu2":
                return torch.relu(x.to(torch.float32)).square()
            case "silu":
                return functional.silu(x.to(torch.float32))
            case "gelu_tanh":
                return functional.gelu(x.to(torch.float32), approximate="tanh")
            case XIelu():
                return xielu(x.to(torch.float32), kind)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gated activation of every element, in the type of the operands."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def xielu(x: Tensor, numbers: XIelu) -> Tensor:
    """xIELU of every element, in the type of x."""
    low = torch.expm1(x.clamp(max=numbers.eps)) - x
    return torch.where(x > 0, numbers.alpha_p * x * x, numbers.alpha_n * low) + numbers.beta * x
