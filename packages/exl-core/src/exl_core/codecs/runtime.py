"""What every codec offers of a quantized matrix that it has checked: codes to compute with, and
the exact values that they mean.

The two are kept apart. The codes stay as the file has them and are repacked by the op table; the
exact dequantization is the format's own definition, roundings included, and is what the other is
judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from exl_core.ops.quantized import QuantColumns, QuantLayout

BLOCK_ROWS = 32  # tables round groups up to so many rows
PANEL_COLUMNS = 16  # and matrices to so many columns


Move = Callable[[Tensor], Tensor]
"""Takes what a file holds to where it is unpacked and computed with."""


def stay(tensor: Tensor) -> Tensor:
    """The move to nowhere."""
    return tensor


class RuntimeMatrix(Protocol):
    """A matrix [in_features, out_features] without padding; ranges of columns, one at a time."""

    @property
    def layout(self) -> QuantLayout: ...

    def columns(self, first: int, last: int, move: Move = stay) -> QuantColumns:
        """Columns first .. last - 1; `first` is a multiple of 16.

        What is large is moved as the file has it, before anything is unpacked.
        """
        ...

    def dense(self, first: int, last: int) -> Tensor:
        """Their exact values, [last - first, in_features]."""
        ...


def packed_bytes(layout: QuantLayout) -> int:
    """Bytes that a matrix of this layout takes in the tables' memory."""
    columns = -(-layout.out_features // PANEL_COLUMNS) * PANEL_COLUMNS
    code_bits = sum(
        run.groups * -(-run.rows // BLOCK_ROWS) * BLOCK_ROWS * run.bits for run in layout.runs
    )
    scale_bytes = layout.scale_dtype.itemsize
    offset_bytes = {"middle": 0, "zeros": 1, "minimums": scale_bytes}[layout.offset]
    return columns * (code_bits // 8 + layout.num_groups * (scale_bytes + offset_bytes))
