"""Elementwise ops of the reference table, in float64."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from exl_core.ops.backends.composed import ComposedGateOps, clamped_swiglu, xielu
from exl_core.ops.checks import F32, OpInputError, check, check_contiguous
from exl_core.ops.elementwise import ActivationKind, GateKind, LayerNorm, RmsNorm, XIelu


class ReferenceElementwiseOps(ComposedGateOps):
    """ElementwiseOps in plain torch."""

    @staticmethod
    def rms_norm(x: Tensor, norm: RmsNorm) -> Tensor:
        check("rms_norm", "x", x, F32, None, None)
        check_contiguous("rms_norm", "x", x, 1)
        check("rms_norm", "weight", norm.weight, F32, x.shape[1])
        return rms_norm_rows(x, norm)

    @staticmethod
    def layer_norm(x: Tensor, norm: LayerNorm) -> Tensor:
        check("layer_norm", "x", x, F32, None, None)
        check_contiguous("layer_norm", "x", x, 1)
        check("layer_norm", "weight", norm.weight, F32, x.shape[1])
        return layer_norm_rows("layer_norm", x, norm)

    @staticmethod
    def activation(x: Tensor, kind: ActivationKind) -> Tensor:
        check("activation", "x", x, F32, None, None)
        check_contiguous("activation", "x", x, 1)
        wide = x.double()
        match kind:
            case "relu2":
                return wide.clamp(min=0).square().float()
            case XIelu():
                return xielu(wide, kind).float()
            case "silu" | "gelu_tanh":
                return active_values(wide, kind).float()
        raise OpInputError(f"activation: {kind}")

    @staticmethod
    def rms_norm_heads_(x: Tensor, norm: RmsNorm) -> None:
        check("rms_norm_heads_", "x", x, F32, None, None, None)
        check_contiguous("rms_norm_heads_", "x", x, 1)
        check("rms_norm_heads_", "weight", norm.weight, F32, x.shape[2])
        x.copy_(rms_norm_rows(x, norm))

    @staticmethod
    def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
        check("rope_", "x", x, F32, None, None, None)
        check_contiguous("rope_", "x", x, 1)
        check("rope_", "cos", cos, F32, x.shape[0], None)
        check("rope_", "sin", sin, F32, x.shape[0], cos.shape[1])
        check_contiguous("rope_", "cos", cos)
        check_contiguous("rope_", "sin", sin)
        half = cos.shape[1]
        if 2 * half > x.shape[2]:
            raise OpInputError(f"rope_: cos (expected at most {x.shape[2] // 2} pairs, got {half})")
        a = x[..., :half].double()
        b = x[..., half : 2 * half].double()
        c = cos[:, None].double()  # [rows, 1, half]
        s = sin[:, None].double()
        x[..., :half] = a * c - b * s
        x[..., half : 2 * half] = b * c + a * s

    @staticmethod
    def gated_activation(gate_up: Tensor, kind: GateKind) -> Tensor:
        check("gated_activation", "gate_up", gate_up, F32, None, None)
        check_contiguous("gated_activation", "gate_up", gate_up, 1)
        if gate_up.shape[1] % 2 != 0 or kind not in get_args(GateKind):
            raise OpInputError(f"gated_activation: {kind} of rows of {gate_up.shape[1]} values")
        gate, up = gate_up.double().chunk(2, dim=1)
        if kind == "clamped_swiglu":
            return clamped_swiglu(gate, up).float()
        return (active_values(gate, kind) * up).float()

    @staticmethod
    def add_(residual: Tensor, y: Tensor) -> Tensor:
        check("add_", "residual", residual, F32, None, None)
        check("add_", "y", y, F32, *residual.shape)
        return residual.add_(y)


def active_values(x: Tensor, kind: Literal["silu", "gelu_tanh"]) -> Tensor:
    if kind == "silu":
        return torch.nn.functional.silu(x)
    # 0.5 x (1 + tanh u) = x sigmoid(2u), which does not cancel for negative x.
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * torch.sigmoid(2 * u)


def layer_norm_rows(op: str, x: Tensor, norm: LayerNorm) -> Tensor:
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True)
    factor = (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    y = wide * factor * norm.weight.double()
    if norm.bias is not None:
        check(op, "bias", norm.bias, F32, x.shape[1])
        y = y + norm.bias.double()
    return y.float()


def rms_norm_rows(x: Tensor, norm: RmsNorm) -> Tensor:
    wide = x.double()
    factor = (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (wide * factor * norm.weight.double()).float()
