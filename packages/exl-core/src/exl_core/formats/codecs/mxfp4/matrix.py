"""Run-time form of MXFP4 matrices: codes by columns, and an exponent per column and group.

w[k, n] = 2^(scale[g, n] - 127) * MXFP4[code[k, n]]
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.formats.codecs.mxfp4 import layout as mxfp4
from exl_core.formats.codecs.mxfp4.layout import BITS, GROUP_ROWS, Mxfp4Linear
from exl_core.formats.codecs.runtime import Move, refuse_nan, stay, stored_rows
from exl_core.ops.weights import NO_EXPONENT, GroupedColumns, GroupedLayout, GroupRun


def group_runs(in_features: int) -> tuple[GroupRun, ...]:
    return (GroupRun(BITS, in_features // GROUP_ROWS, GROUP_ROWS),)


class Mxfp4Matrix:
    """Columns of a matrix: `out_features` of them, from `first_column` on, or those that
    `stored_columns` lists. `where` names the matrix in messages."""

    def __init__(
        self,
        linear: Mxfp4Linear,
        out_features: int,
        *,
        first_column: int = 0,
        stored_columns: Tensor | None = None,
        where: object = None,
    ) -> None:
        self._linear = linear
        self._where = where
        self._rows = stored_rows(out_features, first_column, stored_columns)
        self.layout = GroupedLayout(
            out_features=out_features,
            in_features=linear.in_features,
            runs=group_runs(linear.in_features),
            features=None,
            scale_dtype=torch.uint8,
            formula="mxfp4",
        )

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        rows = self._rows[first:last]
        scales = self._linear.scales[rows]
        refuse_nan(int((scales == NO_EXPONENT).sum()), "scales", self._where)
        codes = mxfp4.codes_of(move(self._linear.blocks[rows]))
        return GroupedColumns("bytes", codes.T.contiguous(), scales=scales.T.contiguous())

    def dense(self, first: int, last: int) -> Tensor:
        return mxfp4.dequantize(self._linear, self._rows[first:last])
