"""Linears of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.composed import xielu
from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.checks import OpInputError
from exl_core.ops.elementwise import ActivationKind, GateKind, LayerNorm, Norm, RmsNorm, XIelu
from exl_core.ops.latent import HeadMatrices
from exl_core.ops.linear import Inputs, PackedLinear
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


@dataclass(frozen=True, slots=True, eq=False)
class CpuHeads:
    """HeadMatrices of the CPU kernels."""

    heads: tuple[exl_kernels.PackedLinear, ...]

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def size_bytes(self) -> int:
        return sum(head.size_bytes for head in self.heads)


class CpuLinearOps:
    """LinearOps of the CPU kernels."""

    _ops: exl_kernels.Table
    min_group_rows = 16  # two such groups share a block of 32 rows

    def new_linear(
        self,
        layout: WeightLayout,
        *,
        on_host: bool = False,  # noqa: ARG002 - all memory is the host's
    ) -> PackedLinear:
        n, k = layout.out_features, layout.in_features
        match layout:
            case DenseLayout():
                return exl_kernels.PackedLinear(n, k, layout.dtype, layout.has_bias)
            case GroupedLayout():
                return exl_kernels.QuantLinear(
                    n,
                    k,
                    layout.runs,
                    layout.features,
                    layout.scale_dtype,
                    layout.formula if layout.has_integers else "middle",
                    layout.has_bias,
                    values="integers" if layout.has_integers else layout.formula,
                )
            case TrellisLayout():
                return exl_kernels.TrellisLinear(
                    n,
                    k,
                    layout.tile_words,
                    layout.codebook,
                    layout.first_out,
                    layout.first_in,
                    layout.has_bias,
                )

    def new_linears(self, layouts: Sequence[WeightLayout]) -> list[PackedLinear]:
        return [self.new_linear(layout) for layout in layouts]

    def fill_linear(self, w: PackedLinear, first_column: int, columns: WeightColumns) -> None:
        match columns:
            case DenseColumns():
                dense = cast(exl_kernels.PackedLinear, w)
                dense.fill(first_column, columns.weight, columns.bias)
            case GroupedColumns():
                cast(exl_kernels.QuantLinear, w).fill(
                    first_column,
                    columns.packing,
                    columns.codes,
                    columns.source_rows,
                    columns.scales,
                    columns.offsets,
                    columns.bias,
                )
            case TrellisColumns():
                if first_column != 0:
                    raise OpInputError("fill_linear: first_column (expected 0 with trellis codes)")
                cast(exl_kernels.TrellisLinear, w).fill(
                    columns.words.view(torch.uint8),
                    columns.in_scales,
                    columns.out_scales,
                    columns.bias,
                )

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        return exl_kernels.JoinedLinear([cast(exl_kernels.Linear, part) for part in parts])

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        out = torch.empty(x.shape[0], w.out_features, dtype=torch.float32)
        self._ops.linear(x, cast(exl_kernels.Linear, w), out)
        return out

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Tensor:  # noqa: ARG002
        return plain

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        self._ops.linear_add_(cast(Tensor, x), cast(exl_kernels.Linear, w), residual)
        return residual

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        return self._norm_product(x, norm, w, out)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None = None
    ) -> Inputs:
        if out is None:
            out = torch.empty(x.shape[0], w.out_features // 2, dtype=torch.float32)
        out = cast(Tensor, out)
        linear = cast(exl_kernels.Linear, w)
        if isinstance(norm, RmsNorm):
            self._ops.norm_gated_linear(x, norm.weight, norm.eps, linear, kind, out)
        else:
            self._ops.gated_activation(self._norm_product(x, norm, w), kind, out)
        return out

    def norm_activated_linear(
        self,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: ActivationKind,
        out: Inputs | None = None,
    ) -> Inputs:
        y = self._norm_product(x, norm, w)
        if out is None:
            out = torch.empty(y.shape, dtype=torch.float32)
        out = cast(Tensor, out)
        if isinstance(kind, XIelu):
            return out.copy_(xielu(y, kind))
        self._ops.activation(y, kind, out)
        return out

    def _norm_product(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = torch.empty(x.shape[0], w.out_features, dtype=torch.float32)
        linear = cast(exl_kernels.Linear, w)
        if isinstance(norm, RmsNorm):
            self._ops.norm_linear(x, norm.weight, norm.eps, linear, out)
        else:
            self._ops.linear(self._layer_normed(x, norm), linear, out)
        return out

    def _layer_normed(self, x: Tensor, norm: LayerNorm) -> Tensor:
        normed = torch.empty(x.shape, dtype=torch.float32)
        self._ops.layer_norm(x, norm.weight, norm.bias, norm.eps, normed)
        return normed

    def new_head_linear(self, weight: Tensor) -> CpuHeads:
        heads = []
        for one in weight.unbind(0):
            matrix = exl_kernels.PackedLinear(one.shape[0], one.shape[1], one.dtype)
            matrix.fill(0, one.contiguous(), None)
            heads.append(matrix)
        return CpuHeads(tuple(heads))

    def head_linear(self, x: Tensor, w: HeadMatrices, out: Tensor | None = None) -> Tensor:
        heads = cast(CpuHeads, w).heads
        if out is None:
            out = torch.empty(x.shape[0], len(heads), heads[0].out_features)
        self._ops.head_linear(x, heads, out)
        return out

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        out = torch.empty(token_ids.shape[0], w.in_features, dtype=torch.float32)
        self._ops.embedding(token_ids, cast(exl_kernels.Linear, w), out)
        return out
