"""Matrices stored as floats that are rounded to 4 bits while they are loaded (round to nearest).

Each group of 64 input features of a column has a float16 scale and a float16 minimum. The codes 0
to 15 are spread evenly from its smallest to its largest value: 4.5 bits per weight. Knows neither
files nor names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exl_core.errors import WeightValueError
from exl_core.formats.codecs.runtime import Move, stay
from exl_core.ops.weights import GroupedColumns, GroupedLayout, GroupRun

BITS = 4
GROUP_ROWS = 64
_LARGEST_CODE = (1 << BITS) - 1

Read = Callable[[int, int, torch.dtype, Move], Tensor]
"""Reads matrix rows first .. last - 1 as a dtype, on the device to which the function moves."""


def layout_of(out_features: int, in_features: int) -> GroupedLayout:
    groups, rest = divmod(in_features, GROUP_ROWS)
    runs = [GroupRun(BITS, groups, GROUP_ROWS)] if groups else []
    if rest:
        runs.append(GroupRun(BITS, 1, rest))
    return GroupedLayout(
        out_features=out_features,
        in_features=in_features,
        runs=tuple(runs),
        features=None,
        scale_dtype=torch.float16,
        formula="minimums",
    )


class RoundedMatrix:
    """A matrix [out_features, in_features] that `read` reads; `where` names it in messages."""

    def __init__(self, shape: tuple[int, ...], read: Read, where: str) -> None:
        self.layout = layout_of(*shape)
        self._read = read
        self._where = where

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
        return rounded(self._read(first, last, torch.float32, move), self._where)

    def dense(self, first: int, last: int) -> Tensor:
        return self._read(first, last, torch.float32, stay)


def rounded(values: Tensor, where: str) -> GroupedColumns:
    """Codes of the matrix columns that the rows of `values` hold, float32 [columns, k].

    Raises WeightValueError if a scale or a minimum overflows float16.
    """
    columns, k = values.shape
    whole = k // GROUP_ROWS * GROUP_ROWS
    parts = [values[:, :whole].reshape(columns, -1, GROUP_ROWS)] if whole else []
    if whole < k:
        parts.append(values[:, whole:].reshape(columns, 1, -1))
    codes, scales, minimums = [], [], []
    for groups in parts:  # [columns, groups, rows]
        low, high = groups.amin(-1), groups.amax(-1)
        scale, minimum = ((high - low) / _LARGEST_CODE).half(), low.half()
        if not (scale.isfinite().all() and minimum.isfinite().all()):
            raise WeightValueError(
                "the weights are too large for 4-bit groups with float16 scales",
                where=where,
                expected=f"at most {torch.finfo(torch.float16).max:.0f}",
                got=float(values.abs().amax()),
                next_step="Load it without --load-in-4bit.",
            )
        step = scale.float().clamp_min(torch.finfo(torch.float16).tiny)  # equal values: code 0
        code = ((groups - minimum.float()[..., None]) / step[..., None]).round_()
        codes.append(code.clamp_(0, _LARGEST_CODE).to(torch.uint8).reshape(columns, -1))
        scales.append(scale)
        minimums.append(minimum)
    return GroupedColumns(
        "bytes",
        torch.cat(codes, 1).T.contiguous(),
        scales=torch.cat(scales, 1).T.contiguous(),
        offsets=torch.cat(minimums, 1).T.contiguous(),
    )
