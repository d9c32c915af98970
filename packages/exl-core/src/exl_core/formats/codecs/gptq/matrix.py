"""Run-time form of GPTQ matrices: the packed words as stored, rows in the order of their groups.

    w[r, n] = scale[g, n] * (code - zero[g, n])          before its rounding to float16

With act-order, the rows of a group are scattered over the file. A stable sort by group makes them
contiguous. All groups have the same size, except a shorter last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.formats.codecs.gptq.layout import GptqLinear
from exl_core.formats.codecs.runtime import Move, StoredColumns, stay
from exl_core.ops.weights import Formula, GroupedColumns, GroupedLayout, GroupRun

COLUMN_STEP = 32  # zero points of this many columns fill whole words, at any width


class GptqMatrix:
    """Columns of a layer: `out_features` of them, from `first_column` on, or those that
    `stored_columns` lists."""

    def __init__(
        self,
        linear: GptqLinear,
        out_features: int,
        *,
        first_column: int = 0,
        stored_columns: Tensor | None = None,
        zeros: Tensor | None = None,
        is_middle: bool | None = None,
        order: Tensor | None = None,
    ) -> None:
        """`zeros`: the unpacked zero points, `is_middle`: whether all are the middle, and `order`:
        the permutation of the rows, if the caller knows them."""
        self._linear = linear
        self._columns = StoredColumns(first_column, stored_columns)
        bits = linear.settings.bits
        if zeros is None:
            zeros = gptq.unpack_zero_points(linear)
        if is_middle is None:
            is_middle = bool((zeros == 1 << (bits - 1)).all())
        self._zeros = None if is_middle else zeros
        formula: Formula = "middle" if is_middle else "zeros"
        self._permutation = order
        if linear.g_idx is not None and order is None:
            self._permutation = linear.g_idx.argsort(stable=True).to(torch.int32)
        self.layout = GroupedLayout(
            out_features=out_features,
            in_features=linear.in_features,
            runs=group_runs(bits, linear.in_features, linear.group_rows),
            features=self._permutation,
            scale_dtype=torch.float16,
            formula=formula,
        )

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        stored, inner = self._columns.span(first, last, 1)
        is_whole = (stored.start, stored.stop) == (0, self._linear.out_features)
        if self._columns.stored is None and is_whole:
            own = self._zeros if self._zeros is None else self._zeros.contiguous()
            words, scales = move(self._linear.qweight), self._linear.scales.contiguous()
            return GroupedColumns("words", words, self._permutation, scales, own)
        zeros = None if self._zeros is None else self._zeros[:, stored][:, inner].contiguous()
        return GroupedColumns(
            "words",
            move(self._linear.qweight[:, stored][:, inner]),
            source_rows=self._permutation,
            scales=self._linear.scales[:, stored][:, inner].contiguous(),
            offsets=zeros,
        )

    def dense(self, first: int, last: int) -> Tensor:
        linear, bits = self._linear, self._linear.settings.bits
        stored, inner = self._columns.span(first, last, COLUMN_STEP)
        start, stop = stored.start, min(stored.stop, linear.out_features)
        part = GptqLinear(
            settings=linear.settings,
            qweight=linear.qweight[:, start:stop],
            qzeros=linear.qzeros[:, start * bits // 32 : stop * bits // 32],
            scales=linear.scales[:, start:stop],
            g_idx=linear.g_idx,
        )
        return gptq.dequantize(part)[:, inner].T.contiguous()


def matrices_of(
    linears: Sequence[GptqLinear], out_features: int, first_column: int
) -> list[GptqMatrix]:
    """Matrices of layers with equal shapes. Zero points and orders of rows are computed jointly."""
    zeros = gptq.joint_zero_points(linears)
    is_middle = (zeros == 1 << (linears[0].settings.bits - 1)).flatten(1).all(1).tolist()
    orders: dict[int, Tensor] = {}
    given = {i: one.g_idx for i, one in enumerate(linears) if one.g_idx is not None}
    if given:
        joint = torch.stack(list(given.values())).argsort(stable=True, dim=1).to(torch.int32)
        orders = dict(zip(given, joint, strict=True))
    return [
        GptqMatrix(
            linear,
            out_features,
            first_column=first_column,
            zeros=zeros[index],
            is_middle=is_middle[index],
            order=orders.get(index),
        )
        for index, linear in enumerate(linears)
    ]


@lru_cache(maxsize=256)
def group_runs(bits: int, rows: int, group_rows: int) -> tuple[GroupRun, ...]:
    """One run of groups of equal size, and one shorter group for the remaining rows."""
    whole, rest = divmod(rows, group_rows)
    runs = (GroupRun(bits, whole, group_rows), GroupRun(bits, 1, rest))
    return tuple(run for run in runs if run.groups and run.rows)
