"""Linears of the reference table: plain matrices, multiplied in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.reference.elementwise import (
    ReferenceElementwiseOps,
    layer_norm_rows,
    rms_norm_rows,
)
from exl_core.ops.backends.reference.quantized import PlainQuantized, fill_grouped, new_grouped
from exl_core.ops.backends.reference.trellis import PlainTrellis, fill_trellis, new_trellis
from exl_core.ops.checks import F32, OpInputError, check, check_contiguous, check_range
from exl_core.ops.elementwise import ActivationKind, GateKind, Norm, RmsNorm
from exl_core.ops.linear import DenseLinear, Inputs, JoinedSizes, PackedLinear
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

WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class PlainLinear(DenseLinear):
    """Dense weights in the type of the file."""

    __slots__ = ()

    def matrix(self) -> Tensor:
        return self.weight.double()


@dataclass(frozen=True, slots=True)
class PlainJoined(JoinedSizes):
    """Linears with the same input; their outputs are concatenated."""

    parts: tuple[PlainLinear | PlainQuantized | PlainTrellis, ...]

    @property
    def bias(self) -> Tensor | None:
        if all(part.bias is None for part in self.parts):
            return None
        return torch.cat(
            [torch.zeros(p.out_features) if p.bias is None else p.bias for p in self.parts]
        )

    def matrix(self) -> Tensor:
        return torch.cat([part.matrix() for part in self.parts])


class ReferenceLinearOps:
    """LinearOps in plain torch."""

    min_group_rows = 1

    @staticmethod
    def new_linear(
        layout: WeightLayout,
        *,
        on_host: bool = False,  # noqa: ARG004 - all memory is the host's
    ) -> PackedLinear:
        match layout:
            case DenseLayout():
                return _new_dense(layout)
            case GroupedLayout():
                return new_grouped(layout)
            case TrellisLayout():
                return new_trellis(layout)

    def new_linears(self, layouts: Sequence[WeightLayout]) -> list[PackedLinear]:
        return [self.new_linear(layout) for layout in layouts]

    @staticmethod
    def fill_linear(w: PackedLinear, first_column: int, columns: WeightColumns) -> None:
        match columns:
            case DenseColumns():
                if not isinstance(w, PlainLinear):
                    raise OpInputError("fill_linear: w (expected one of a dense layout)")
                _fill_dense(w, first_column, columns)
            case GroupedColumns():
                if not isinstance(w, PlainQuantized):
                    raise OpInputError("fill_linear: w (expected one of a grouped layout)")
                fill_grouped(w, first_column, columns)
            case TrellisColumns():
                if not isinstance(w, PlainTrellis):
                    raise OpInputError("fill_linear: w (expected one of a trellis layout)")
                fill_trellis(w, first_column, columns)

    @staticmethod
    def join(parts: Sequence[PackedLinear]) -> PackedLinear:
        plain = [_plain("join", part) for part in parts]
        if len({part.in_features for part in plain}) != 1:
            raise OpInputError("join: parts (expected some, of equal in_features)")
        flat = [
            inner
            for part in plain
            for inner in (part.parts if isinstance(part, PlainJoined) else (part,))
        ]
        return PlainJoined(tuple(flat))

    @staticmethod
    def linear(x: Tensor, w: PackedLinear) -> Tensor:
        return _linear("linear", x, w).float()

    @staticmethod
    def inputs_for(w: PackedLinear, plain: Tensor) -> Tensor:  # noqa: ARG004
        return plain

    @staticmethod
    def linear_add_(x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        y = _linear("linear_add_", cast(Tensor, x), w)
        check("linear_add_", "residual", residual, F32, *y.shape)
        check_contiguous("linear_add_", "residual", residual)
        return residual.copy_(residual + y)

    @staticmethod
    def norm_linear(x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None) -> Tensor:
        return _copy_to("norm_linear", _norm_linear("norm_linear", x, norm, w), out)

    @staticmethod
    def norm_gated_linear(
        x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None = None
    ) -> Inputs:
        op = "norm_gated_linear"
        if w.out_features % 2 != 0:
            raise OpInputError(f"{op}: w ({w.out_features} are no two halves)")
        y = ReferenceElementwiseOps.gated_activation(_norm_linear(op, x, norm, w), kind)
        return _copy_to(op, y, cast(Tensor | None, out))

    @staticmethod
    def norm_activated_linear(
        x: Tensor, norm: Norm, w: PackedLinear, kind: ActivationKind, out: Inputs | None = None
    ) -> Inputs:
        op = "norm_activated_linear"
        y = ReferenceElementwiseOps.activation(_norm_linear(op, x, norm, w), kind)
        return _copy_to(op, y, cast(Tensor | None, out))

    @staticmethod
    def embedding(token_ids: Tensor, w: PackedLinear) -> Tensor:
        check("embedding", "token_ids", token_ids, (torch.int64,), None)
        check_contiguous("embedding", "token_ids", token_ids)
        check_range("embedding", "token_ids", token_ids, w.out_features)
        return _plain("embedding", w).matrix()[token_ids].float()


def _new_dense(layout: DenseLayout) -> PlainLinear:
    n, k, dtype = layout.out_features, layout.in_features, layout.dtype
    if n < 1 or k < 1 or dtype not in WEIGHT_TYPES:
        raise OpInputError(f"new_linear: {n} x {k} of {dtype}")
    return PlainLinear(torch.zeros(n, k, dtype=dtype), torch.zeros(n) if layout.has_bias else None)


def _fill_dense(w: PlainLinear, first_column: int, columns: DenseColumns) -> None:
    weight, bias = columns.weight, columns.bias
    check("fill_linear", "weight", weight, (w.weight.dtype,), None, w.in_features)
    check_contiguous("fill_linear", "weight", weight)
    rows = slice(first_column, first_column + weight.shape[0])
    if first_column < 0 or rows.stop > w.out_features:
        raise OpInputError(
            f"fill_linear: first_column (expected columns within [0, {w.out_features}), got"
            f" {weight.shape[0]} columns at {first_column})"
        )
    if (bias is None) != (w.bias is None):
        raise OpInputError("fill_linear: bias (expected one exactly if the linear has one)")
    w.weight[rows] = weight
    if bias is not None and w.bias is not None:
        check("fill_linear", "bias", bias, F32, weight.shape[0])
        w.bias[rows] = bias


def _plain(op: str, w: PackedLinear) -> PlainLinear | PlainQuantized | PlainTrellis | PlainJoined:
    if not isinstance(w, PlainLinear | PlainQuantized | PlainTrellis | PlainJoined):
        raise OpInputError(f"{op}: w (expected a linear of the reference table)")
    return w


def _linear(op: str, x: Tensor, w: PackedLinear) -> Tensor:
    """x @ w, float64."""
    plain = _plain(op, w)
    check(op, "x", x, F32, None, w.in_features)
    check_contiguous(op, "x", x, 1)
    y = x.double() @ plain.matrix().T
    return y if plain.bias is None else y + plain.bias


def _copy_to(op: str, result: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result
    check(op, "out", out, F32, *result.shape)
    check_contiguous(op, "out", out)
    return out.copy_(result)


def _norm_linear(op: str, x: Tensor, norm: Norm, w: PackedLinear) -> Tensor:
    check(op, "x", x, F32, None, w.in_features)
    check_contiguous(op, "x", x, 1)
    check(op, "norm", norm.weight, F32, w.in_features)
    check_contiguous(op, "norm", norm.weight)
    rows = rms_norm_rows(x, norm) if isinstance(norm, RmsNorm) else layer_norm_rows(op, x, norm)
    return _linear(op, rows, w).float()
