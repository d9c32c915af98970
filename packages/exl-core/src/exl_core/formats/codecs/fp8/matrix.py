"""Run-time form of FP8 matrices: the stored bytes by columns, and a scale per column and group.

w[k, n] = scale[g, n] * number(weight[n, k])
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.formats.codecs.fp8 import layout as fp8
from exl_core.formats.codecs.fp8.layout import Fp8Linear
from exl_core.formats.codecs.gptq.matrix import group_runs
from exl_core.formats.codecs.runtime import Move, exact_scales, refuse_nan, stay, stored_rows
from exl_core.ops.weights import GroupedColumns, GroupedLayout

BITS = 8


class Fp8Matrix:
    """Columns of a matrix: `out_features` of them, from `first_column` on, or those that
    `stored_columns` lists. `where` names the matrix in messages."""

    def __init__(
        self,
        linear: Fp8Linear,
        out_features: int,
        *,
        first_column: int = 0,
        stored_columns: Tensor | None = None,
        where: object = None,
    ) -> None:
        self._linear = linear
        self._where = where
        self._rows = stored_rows(out_features, first_column, stored_columns)
        self._scale_dtype = exact_scales(linear.scales).dtype
        self.layout = GroupedLayout(
            out_features=out_features,
            in_features=linear.in_features,
            runs=group_runs(BITS, linear.in_features, linear.group_rows),
            features=None,
            scale_dtype=self._scale_dtype,
            formula="e4m3",
        )

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        rows = self._rows[first:last]
        codes = move(self._linear.weight.view(torch.uint8)[rows])
        refuse_nan(int(((codes & 0x7F) == 0x7F).sum()), "weight", self._where)
        scales = self._linear.row_scales(rows).T.to(self._scale_dtype)
        return GroupedColumns("bytes", codes.T.contiguous(), scales=scales.contiguous())

    def dense(self, first: int, last: int) -> Tensor:
        return fp8.dequantize(self._linear, self._rows[first:last])
