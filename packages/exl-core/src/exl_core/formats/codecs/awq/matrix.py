"""Run-time form of AWQ matrices: codes as bytes, zero points and scales in the order of columns.

    w[k, n] = scale[g, n] * (code - zero[g, n])

The op tables store it as they store GPTQ matrices of 4 bits.
"""

from __future__ import annotations

from torch import Tensor

from exl_core.formats.codecs.awq import layout as awq
from exl_core.formats.codecs.awq.layout import PER_WORD, AwqLinear
from exl_core.formats.codecs.runtime import Move, StoredColumns, exact_scales, stay
from exl_core.ops.weights import Formula, GroupedColumns, GroupedLayout, GroupRun

MIDDLE = 8


class AwqMatrix:
    """Columns of a layer: `out_features` of them, from `first_column` on, or those that
    `stored_columns` lists."""

    def __init__(
        self,
        linear: AwqLinear,
        out_features: int,
        *,
        first_column: int = 0,
        stored_columns: Tensor | None = None,
    ) -> None:
        self._linear = linear
        self._columns = StoredColumns(first_column, stored_columns)
        zeros = awq.unpack(linear.qzeros)
        self._zeros = None if bool((zeros == MIDDLE).all()) else zeros
        self._scales = exact_scales(linear.scales)
        formula: Formula = "middle" if self._zeros is None else "zeros"
        self.layout = GroupedLayout(
            out_features=out_features,
            in_features=linear.in_features,
            runs=group_runs(linear.in_features, linear.group_rows),
            features=None,
            scale_dtype=self._scales.dtype,
            formula=formula,
        )

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        stored, inner = self._columns.span(first, last, PER_WORD)
        codes = awq.unpack(move(self._linear.qweight[:, _words(stored)].contiguous()))
        zeros = None if self._zeros is None else self._zeros[:, stored][:, inner].contiguous()
        return GroupedColumns(
            "bytes",
            codes[:, inner],
            scales=self._scales[:, stored][:, inner].contiguous(),
            offsets=zeros,
        )

    def dense(self, first: int, last: int) -> Tensor:
        linear, (stored, inner) = self._linear, self._columns.span(first, last, PER_WORD)
        part = AwqLinear(
            group_rows=linear.group_rows,
            qweight=linear.qweight[:, _words(stored)],
            qzeros=linear.qzeros[:, _words(stored)],
            scales=linear.scales[:, stored],
        )
        return awq.dequantize(part)[:, inner].T.contiguous()


def _words(columns: slice) -> slice:
    """Words that hold these columns, a multiple of 8 from a multiple of 8 on."""
    return slice(columns.start // PER_WORD, columns.stop // PER_WORD)


def group_runs(in_features: int, group_rows: int) -> tuple[GroupRun, ...]:
    return (GroupRun(awq.BITS, in_features // group_rows, group_rows),)
