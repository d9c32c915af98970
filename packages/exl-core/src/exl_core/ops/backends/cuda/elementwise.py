"""Elementwise ops of one GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from exl_core.ops.backends.composed import xielu
from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.matmul import Linears
from exl_core.ops.elementwise import ActivationKind, GateKind, LayerNorm, RmsNorm, XIelu


class CudaElementwiseOps:
    """ElementwiseOps of one GPU."""

    _gpu: Gpu
    _linears: Linears

    def rms_norm(self, x: Tensor, norm: RmsNorm) -> Tensor:
        rows, columns = x.shape
        out = self._gpu.empty(rows, columns)
        if rows:
            source = x.data_ptr(), TYPES[x.dtype], x.stride(0), norm.weight.data_ptr(), norm.eps
            target = out.data_ptr(), TYPES[out.dtype], out.stride(0)
            self._gpu.call("rms_norm", *source, rows, columns, *target)
        return out

    def rms_norm_heads_(self, x: Tensor, norm: RmsNorm) -> None:
        if x.numel():
            operands = x.data_ptr(), TYPES[x.dtype], x.stride(0), norm.weight.data_ptr(), norm.eps
            self._gpu.call("rms_norm_heads", *operands, *x.shape)

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        if x.numel():
            operands = x.data_ptr(), TYPES[x.dtype], x.stride(0), cos.data_ptr(), sin.data_ptr()
            self._gpu.call("rope", *operands, cos.shape[1], *x.shape)

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        wide = x.to(torch.float32)
        return functional.layer_norm(wide, wide.shape[-1:], norm.weight, norm.bias, norm.eps)

    def activation(self, x: Tensor, kind: ActivationKind) -> Tensor:
        if isinstance(kind, XIelu):
            return xielu(x.to(torch.float32), kind)
        out = self._gpu.empty(*x.shape)
        self._linears.activate(x, kind, out)
        return out

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        out = self._gpu.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._linears.gate(gate_up, kind, out)
        return out

    @staticmethod
    def add_(residual: Tensor, y: Tensor) -> Tensor:
        return residual.add_(y)
