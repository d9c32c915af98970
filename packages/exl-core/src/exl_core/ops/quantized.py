"""Quantized matrices as the op tables take them: groups of codes with a scale and an offset.

EXL2, GPTQ and GGUF blocks are all of one family. Rows lie along the input dimension, in the order
in which they are stored; stored row r belongs to input feature `features[r]`, and consecutive rows
form groups:

    middle     w[r, n] = scales[g, n] * (code[r, n] - 2^(bits - 1))
    zeros      w[r, n] = scales[g, n] * (code[r, n] - offsets[g, n])
    minimums   w[r, n] = scales[g, n] * code[r, n] + offsets[g, n]

A layout says this of a whole matrix, before anything is read; `QuantColumns` are some of its
columns as a file holds them. Knows neither files nor the layout that a kernel wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, dtype

Offset = Literal["middle", "zeros", "minimums"]

Packing = Literal["words", "bytes", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]

WIDTHS = (2, 3, 4, 5, 6, 8)

FILL_STEP = 32
"""Every table fills columns in ranges that begin at multiples of it (some at finer ones)."""


class GroupRun(NamedTuple):
    """Consecutive groups of one width and size; a shorter last group is a run of its own."""

    bits: int
    groups: int
    rows: int  # of each group


@dataclass(frozen=True, slots=True, eq=False)
class QuantLayout:
    """A matrix [in_features, out_features]; `features` is int32 [in_features] or None, in order.

    `scale_dtype` is float16 or float32, and holds for minimums too; zeros are uint8.
    """

    out_features: int
    in_features: int
    runs: tuple[GroupRun, ...]
    features: Tensor | None
    scale_dtype: dtype
    offset: Offset
    has_bias: bool = False

    @property
    def num_groups(self) -> int:
        return sum(run.groups for run in self.runs)


@dataclass(frozen=True, slots=True, eq=False)
class QuantColumns:
    """Some columns of a matrix as a file has them.

    `codes` by packing:

    - words  int32 [words, columns]: down each column, the codes of all stored rows one after the
      other, lowest bits first (`codecs/bits.py`); rows may lie apart
    - bytes  uint8 [in_features, columns]: one code each; rows may lie apart
    - q4_0 and the other names of GGML: uint8 [columns, bytes of a row], its blocks of 32 with the
      scales inside

    `source_rows`, int32 [in_features], is the row of `codes` that holds each stored row; None where
    it is the same. `scales` and `offsets` are [groups, columns]; `offsets` are None in the middle,
    and both are for GGML blocks. `bias` is float32 [columns].
    """

    packing: Packing
    codes: Tensor
    source_rows: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    bias: Tensor | None = None
