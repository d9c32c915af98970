"""Quantized matrices as the op tables expect them: groups of codes with a scale and an offset.

EXL2, GPTQ and GGUF blocks share one form. Rows run along the input dimension, in the order in which
they are stored. Stored row r belongs to input feature `features[r]`. Consecutive rows form groups.
The offset of a layout selects one of three formulas:

    middle     w[r, n] = scales[g, n] * (code[r, n] - 2^(bits - 1))
    zeros      w[r, n] = scales[g, n] * (code[r, n] - offsets[g, n])
    minimums   w[r, n] = scales[g, n] * code[r, n] + offsets[g, n]

Codes may also stand for other numbers than integers (`Values`). Their layout has the offset
"middle", and nothing is stored for it:

    e4m3       w[r, n] = scales[g, n] * number(code[r, n])     8 bits: OCP FP8 E4M3, without NaN
    iq4_nl     w[r, n] = scales[g, n] * IQ4_NL[code[r, n]]     4 bits: index into a table

`QuantLayout` describes a whole matrix before its codes are read. `QuantColumns` holds some of its
columns as stored in a file. This module knows neither files nor the run-time form of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, dtype

Offset = Literal["middle", "zeros", "minimums"]

Values = Literal["integers", "e4m3", "iq4_nl"]

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Table of GGML's types IQ4_NL and IQ4_XS."""

VALUE_BITS: dict[Values, int] = {"e4m3": 8, "iq4_nl": 4}
"""Bit width of codes that are not integers."""

Packing = Literal["words", "bytes", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]

WIDTHS = (2, 3, 4, 5, 6, 8)

FILL_STEP = 32
"""Every table can fill ranges of columns that begin at a multiple of this (some at finer steps)."""


class GroupRun(NamedTuple):
    """Consecutive groups with the same bit width and size; a shorter last group is its own run."""

    bits: int
    groups: int
    rows: int  # rows per group


@dataclass(frozen=True, slots=True, eq=False)
class QuantLayout:
    """Layout of a matrix [in_features, out_features].

    `features` is int32 [in_features]; None means that stored row r is input feature r.
    `scale_dtype` is float16 or float32 and applies to minimums too; zeros are uint8.
    """

    out_features: int
    in_features: int
    runs: tuple[GroupRun, ...]
    features: Tensor | None
    scale_dtype: dtype
    offset: Offset
    has_bias: bool = False
    values: Values = "integers"

    @property
    def num_groups(self) -> int:
        return sum(run.groups for run in self.runs)


@dataclass(frozen=True, slots=True, eq=False)
class QuantColumns:
    """Some columns of a matrix as stored in a file.

    `codes` by packing:

    - words: int32 [words, columns]. Each column is a bit stream of the codes of all stored rows,
      lowest bits first (`formats/codecs/bits.py`). Rows of the tensor may be strided.
    - bytes: uint8 [in_features, columns], one code per byte. Rows of the tensor may be strided.
    - q4_0 and the other GGML names: uint8 [columns, bytes per column], blocks of 32 codes that
      contain their scales.

    `source_rows`, int32 [in_features], gives the row of `codes` that holds each stored row; None
    means the same row. `scales` and `offsets` are [groups, columns]. `offsets` is None if the
    layout's offset is "middle". Both are None for GGML blocks. `bias` is float32 [columns].
    """

    packing: Packing
    codes: Tensor
    source_rows: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    bias: Tensor | None = None
