"""Run-time form of EXL2 matrices: the packed words as stored, and the expanded scales.

    w[r, n] = scale[g, n] * (code - 2^(bits - 1))        before its rounding to float16

The scales are the format's own, with its two roundings. Only the rounding of the product is left
out. Columns that the writer padded are never returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
        layout: GroupedLayout | None = None,
    ) -> None:
        self._linear = linear
        self._columns = StoredColumns(first_column, stored_columns)
        self._prescale = prescale
        self.layout = layout or GroupedLayout(
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

    @property
    def whole(self) -> tuple[Exl2Linear, float] | None:
        """The layer and its factor, if the matrix has all of its columns in order."""
        is_whole = self._columns.stored is None and self._columns.first == 0
        if not is_whole or self.layout.out_features != self._linear.out_features:
            return None
        return self._linear, self._prescale

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


def matrices_of(
    linears: Sequence[Exl2Linear], out_features: int, first_column: int
) -> list[Exl2Matrix]:
    """Matrices of layers with equal shapes and group tables, with one search for their orders."""
    runs = runs_of(linears[0].groups)
    orders = torch.stack([linear.q_invperm for linear in linears])
    rows = torch.arange(orders.shape[1], dtype=torch.int32).expand_as(orders)
    features = torch.empty_like(orders).scatter_(1, orders.long(), rows)
    is_plain = (orders == rows).all(1).tolist()
    count = linears[0].in_features
    return [
        Exl2Matrix(
            linear,
            out_features,
            first_column=first_column,
            layout=GroupedLayout(
                out_features, count, runs, None if plain else order, torch.float16, "middle"
            ),
        )
        for linear, order, plain in zip(linears, features, is_plain, strict=True)
    ]


def whole_columns(matrices: Sequence[Exl2Matrix], move: Move = stay) -> list[GroupedColumns]:
    """`columns` of all columns of some matrices. Scales of matrices with the same number of columns
    are unpacked jointly, where `move` copies their codes. The words of these matrices stay where
    they are."""
    alike: dict[object, list[int]] = {}
    for index, one in enumerate(matrices):
        whole = one.whole
        key = index if whole is None else (whole[0].out_features, whole[1], "")
        alike.setdefault(key, []).append(index)
    found: dict[int, GroupedColumns] = {}
    for members in alike.values():
        parts = [whole for index in members if (whole := matrices[index].whole) is not None]
        if len(parts) < 2:
            (index,) = members
            found[index] = matrices[index].columns(0, matrices[index].layout.out_features, move)
            continue
        linears = [linear for linear, _ in parts]
        scales = exl2.unpack_joint_scales(linears, parts[0][1], move)
        for index, linear, own in zip(members, linears, scales, strict=True):
            found[index] = GroupedColumns("words", linear.q_weight, scales=own)
    return [found[index] for index in range(len(matrices))]


@lru_cache(maxsize=1024)
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
