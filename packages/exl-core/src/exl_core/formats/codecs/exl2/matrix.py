"""Run-time form of EXL2 matrices: the packed words as stored, and the expanded scales.

    w[r, n] = scale[g, n] * (code - 2^(bits - 1))        before its rounding to float16

The scales are the format's own, with its two roundings. Only the rounding of the product is left
out. Columns that the writer padded are never returned.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2.layout import COLUMN_STEP, Exl2Group, Exl2Linear
from exl_core.formats.codecs.runtime import Move, StoredColumns, stay
from exl_core.ops.weights import GroupedColumns, GroupedLayout, GroupRun


class Exl2Matrix:
    """Columns of a layer: `out_features` of them, from `first_column` on, or those that
    `stored_columns` lists."""

    def __init__(
        self,
        linear: Exl2Linear,
        out_features: int,
        *,
        first_column: int = 0,
        stored_columns: Tensor | None = None,
        prescale: float = 1.0,
    ) -> None:
        self._linear = linear
        self._columns = StoredColumns(first_column, stored_columns)
        self._prescale = prescale
        self.layout = GroupedLayout(
            out_features=out_features,
            in_features=linear.in_features,
            runs=runs_of(linear.groups),
            features=_features(linear.q_invperm),
            scale_dtype=torch.float16,
            formula="middle",
        )

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        part, inner = self._part(first, last)
        scales = exl2.unpack_scales(part, prescale=self._prescale, move=move)[:, inner]
        return GroupedColumns("words", move(part.q_weight[:, inner]), scales=scales.contiguous())

    def dense(self, first: int, last: int) -> Tensor:
        part, inner = self._part(first, last)
        return exl2.dequantize(part, prescale=self._prescale)[:, inner].T.contiguous()

    def _part(self, first: int, last: int) -> tuple[Exl2Linear, slice | Tensor]:
        """A layer that has the columns first .. last - 1, extended to whole words of scale codes,
        and their indices in it."""
        linear = self._linear
        stored, inner = self._columns.span(first, last, COLUMN_STEP)
        part = Exl2Linear(
            q_weight=linear.q_weight[:, stored],
            q_scale=linear.q_scale[:, stored.start // 8 : stored.stop // 8],
            q_scale_max=linear.q_scale_max,
            q_groups=linear.q_groups,
            q_invperm=linear.q_invperm,
        )
        return part, inner


def runs_of(groups: tuple[Exl2Group, ...]) -> tuple[GroupRun, ...]:
    """Runs of consecutive groups with equal width and size."""
    alike = groupby(groups, key=lambda group: (group.bits, group.rows))
    return tuple(GroupRun(bits, len(list(run)), rows) for (bits, rows), run in alike)


def _features(invperm: Tensor) -> Tensor | None:
    """Feature of each stored row, int32 [in_features]; None if the permutation is the identity."""
    rows = torch.arange(invperm.shape[0], dtype=torch.int32)
    if torch.equal(invperm, rows):
        return None
    features = torch.empty_like(rows)
    features[invperm.long()] = rows
    return features
