"""Activations that backends compute with torch, on their own device.

Few families need them, and they take a small part of a layer's time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT, XIelu


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gated activation of every element, in the type of the operands."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def xielu(x: Tensor, numbers: XIelu) -> Tensor:
    """xIELU of every element, in the type of x."""
    low = torch.expm1(x.clamp(max=numbers.eps)) - x
    return torch.where(x > 0, numbers.alpha_p * x * x, numbers.alpha_n * low) + numbers.beta * x
