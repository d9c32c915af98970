"""Linears of one GPU: allocates outputs, and chooses between tensors and prepared inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from exl_core.ops.backends.composed import xielu
from exl_core.ops.backends.cuda.library import TYPES, Gpu, Slab
from exl_core.ops.backends.cuda.matmul import (
    CudaInputs,
    CudaJoined,
    CudaLinear,
    Linears,
    are_trellis,
    parts_of,
)
from exl_core.ops.backends.cuda.quantized import CudaQuantLinear, tiles_bytes
from exl_core.ops.backends.cuda.trellis import (
    CudaTrellis,
    CudaTrellisInputs,
    TrellisRead,
    are_joint,
    trellis_bytes,
)
from exl_core.ops.checks import OpInputError
from exl_core.ops.elementwise import ActivationKind, GateKind, Norm, RmsNorm, XIelu
from exl_core.ops.linear import Inputs, NextRead, PackedLinear
from exl_core.ops.table import LayerOps
from exl_core.ops.weights import (
    DenseColumns,
    DenseLayout,
    GroupedColumns,
    GroupedLayout,
    TrellisColumns,
    TrellisLayout,
    WeightColumns,
    WeightLayout,
)
from exl_core.ops.wrapped import WrappedOps


def trellis_read(read: NextRead) -> TrellisRead | None:
    """The same with trellis codes, if kernels prepare its inputs when they write the sum."""
    parts = parts_of(read.w)
    if isinstance(read.norm, RmsNorm) and are_trellis(parts) and are_joint(parts):
        return TrellisRead(read.norm, parts)
    return None


class StepOps(WrappedOps):
    """Ops of a step whose sum is read as `read` says."""

    def __init__(self, inner: LayerOps, linears: Linears, read: TrellisRead) -> None:
        super().__init__(inner)
        self._linears = linears
        self._read = read

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        if not isinstance(x, CudaTrellisInputs):
            return self.inner.linear_add_(x, w, residual)
        self._linears.multiply_prepared(x, residual, self._read)
        return residual


class CudaLinearOps:
    """LinearOps of one GPU."""

    _gpu: Gpu
    _linears: Linears
    min_group_rows = 16  # of GGUF blocks; others are padded

    def new_linear(self, layout: WeightLayout, *, on_host: bool = False) -> PackedLinear:
        return self._linears.new(layout, on_host)

    def new_linears(self, layouts: Sequence[WeightLayout]) -> list[PackedLinear]:
        sizes: list[int] = []
        for layout in layouts:
            match layout:
                case GroupedLayout():
                    sizes.append(tiles_bytes(layout))
                case TrellisLayout():
                    sizes += trellis_bytes(layout)
                case DenseLayout():
                    raise OpInputError("new_linears: layouts (expected codes, got float16)")
        memory = Slab(self._gpu, sizes)
        return [self._linears.new(layout, on_host=False, memory=memory) for layout in layouts]

    def fill_linear(self, w: PackedLinear, first_column: int, columns: WeightColumns) -> None:
        match columns:
            case DenseColumns():
                self._linears.fill_dense(cast(CudaLinear, w), first_column, columns)
            case GroupedColumns():
                cast(CudaQuantLinear, w).fill(first_column, columns)
            case TrellisColumns():
                cast(CudaTrellis, w).fill(first_column, columns)

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        each = [part for w in parts for part in parts_of(w)]
        return CudaJoined(tuple(self._linears.few_parts(each)))

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        out = self._gpu.empty(x.shape[0], w.out_features)
        self._linears.multiply(x, w, out)
        return out

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:
        return self._linears.inputs_for(w, plain.shape[0]) or plain

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        if isinstance(x, CudaInputs | CudaTrellisInputs):
            self._linears.multiply_prepared(x, residual)
        else:
            self._linears.multiply(cast(Tensor, x), w, residual, is_added=True)
        return residual

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = self._gpu.empty(x.shape[0], w.out_features)
        self._linears.multiply(x, w, out, norm=norm)
        return out

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None = None
    ) -> Inputs:
        if out is None:
            out = self._gpu.empty(x.shape[0], w.out_features // 2)
        to = cast(Tensor | CudaInputs | CudaTrellisInputs, out)
        self._linears.multiply_gated(x, w, to, norm, kind)
        return out

    def norm_activated_linear(
        self,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: ActivationKind,
        out: Inputs | None = None,
    ) -> Inputs:
        if out is None:
            out = self._gpu.empty(x.shape[0], w.out_features)
        to = cast(Tensor | CudaInputs | CudaTrellisInputs, out)
        if isinstance(kind, XIelu):
            y = xielu(self.norm_linear(x, norm, w), kind)
            if isinstance(to, Tensor):
                to.copy_(y)
            else:
                self._linears.prepare_for(to, y)
        else:
            self._linears.multiply_activated(x, w, to, norm, kind)
        return out

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        rows = token_ids.shape[0]
        out = self._gpu.empty(rows, w.in_features)
        (part,) = parts_of(w)
        if isinstance(part, CudaTrellis):
            raise OpInputError("embedding: w (expected no trellis codes)")
        if rows == 0:
            return out
        ids, to = token_ids.data_ptr(), out.data_ptr()
        if isinstance(part, CudaQuantLinear):
            self._gpu.call("quant_embedding", part.matrix, ids, rows, to)
        else:
            weight = part.weight
            source = weight.data_ptr(), TYPES[weight.dtype]
            self._gpu.call("embedding", *source, ids, rows, w.in_features, to)
        return out
