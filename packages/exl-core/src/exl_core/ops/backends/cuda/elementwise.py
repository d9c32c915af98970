"""Elementwise ops of one GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from exl_core.ops.backends.composed import xielu
from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.matmul import CudaInputs, Linears
from exl_core.ops.elementwise import (
    ActivationKind,
    GateKind,
    Gating,
    LayerNorm,
    RmsNorm,
    XIelu,
)
from exl_core.ops.linear import Inputs, PackedLinear
from exl_kernels import cuda
from exl_kernels.cuda_recurrent import GateHeads


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

    def gate_heads(
        self, x: Tensor, gate: Tensor, gating: Gating, to: PackedLinear | None = None
    ) -> Inputs:
        rows, columns = x.shape
        operands = GateHeads(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            x_dtype=TYPES[x.dtype],
            gate_dtype=TYPES[gate.dtype],
            out_dtype=TYPES[torch.float16],
            m=rows,
            k=columns,
            head_dim=gating.head_dim,
            is_sigmoid=gating.kind == "sigmoid",
            is_gate_first=gating.is_gate_first,
            is_row_gate=gate.shape[1] == 1 and columns > 1,
        )
        if gating.norm is not None:
            weight = gating.norm.weight
            operands.norm, operands.norm_size = weight.data_ptr(), len(weight)
            operands.eps = gating.norm.eps
        held = None if to is None else self._linears.inputs_for(to, rows)
        if isinstance(held, CudaInputs):
            operands.out = held.memory.data_ptr()
            operands.inverse_permutation = held.inverse_permutation
            held.is_by_rows = rows > cuda.TILE_ROWS
            self._gpu.call("gate_heads", operands)
            return held
        out = self._gpu.empty(rows, columns, dtype=torch.float16)
        operands.out, operands.out_stride = out.data_ptr(), out.stride(0)
        self._gpu.call("gate_heads", operands)
        if held is None:
            return out
        self._linears.prepare_for(held, out)
        return held

    @staticmethod
    def add_(residual: Tensor, y: Tensor) -> Tensor:
        return residual.add_(y)
