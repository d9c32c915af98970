"""Run-time form of packed compressed-tensors matrices: words as stored, turned to columns.

    w[k, n] = scale[n, g] * (code - zero[n, g])

A row of the file is the bit stream of a column of the run-time form. With `weight_g_idx`, a stable
sort by group makes the features of a group contiguous, as for GPTQ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.formats.codecs.compressed import layout as compressed
from exl_core.formats.codecs.compressed.layout import CompressedLinear
from exl_core.formats.codecs.gptq.matrix import group_runs
from exl_core.formats.codecs.runtime import Move, StoredColumns, exact_scales, stay
from exl_core.ops.weights import Formula, GroupedColumns, GroupedLayout


class CompressedMatrix:
    """Columns of a layer: `out_features` of them, from `first_column` on, or those that
    `stored_columns` lists."""

    def __init__(
        self,
        linear: CompressedLinear,
        out_features: int,
        *,
        first_column: int = 0,
        stored_columns: Tensor | None = None,
    ) -> None:
        self._linear = linear
        self._columns = StoredColumns(first_column, stored_columns)
        self._scales = exact_scales(linear.scales)
        middle = 1 << (linear.bits - 1)
        is_middle = linear.zeros is None or bool((linear.zeros == middle).all())
        self._zeros = None if is_middle else linear.zeros
        self._permutation = None
        if linear.g_idx is not None:
            self._permutation = linear.g_idx.argsort(stable=True).to(torch.int32)
        formula: Formula = "middle" if self._zeros is None else "zeros"
        self.layout = GroupedLayout(
            out_features=out_features,
            in_features=linear.in_features,
            runs=group_runs(linear.bits, linear.in_features, linear.group_rows),
            features=self._permutation,
            scale_dtype=self._scales.dtype,
            formula=formula,
        )

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        stored, inner = self._columns.span(first, last, 1)
        zeros = None if self._zeros is None else self._zeros[stored][inner].T.contiguous()
        return GroupedColumns(
            "words",
            move(self._linear.weight_packed[stored][inner]).T.contiguous(),
            source_rows=self._permutation,
            scales=self._scales[stored][inner].T.contiguous(),
            offsets=zeros,
        )

    def dense(self, first: int, last: int) -> Tensor:
        stored, inner = self._columns.span(first, last, 1)
        return compressed.dequantize(self._linear, stored.start, stored.stop)[inner].contiguous()
