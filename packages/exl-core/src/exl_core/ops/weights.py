"""Weights of a linear as the op tables expect them: a layout, and columns to fill a matrix with.

`WeightLayout` describes a whole matrix before its weights are read. `WeightColumns` holds some of
its columns as stored in a file. Both are sum types with one member per kind of storage. The ops
(`ops/linear.py` and its backends) tell the kinds apart; other code only passes them on.

Dense weights are plain numbers.

Grouped codes: EXL2, GPTQ, FP8 and GGUF blocks share one form. Rows run along the input dimension,
in the order in which they are stored. Stored row r belongs to input feature `features[r]`.
Consecutive rows form groups with a scale, and in some formulas an offset:

    middle     w[r, n] = scales[g, n] * (code[r, n] - 2^(bits - 1))
    zeros      w[r, n] = scales[g, n] * (code[r, n] - offsets[g, n])
    minimums   w[r, n] = scales[g, n] * code[r, n] + offsets[g, n]
    e4m3       w[r, n] = scales[g, n] * number(code[r, n])     8 bits: OCP FP8 E4M3, without NaN
    iq4_nl     w[r, n] = scales[g, n] * IQ4_NL[code[r, n]]     4 bits: index into a table
    mxfp4      w[r, n] = 2^(scales[g, n] - 127) * MXFP4[code[r, n]]    the same (OCP MX, E2M1)

Trellis codes: EXL3. The stored matrix V [I, N] is rotated on both sides:

    w[i, n] = in_scales[i] * (H V H)[i, n] * out_scales[n]

H consists of normalized Hadamard matrices of 128 rows on the diagonal. V is made of tiles of
16 x 16 values. Each tile is a ring of bits, and each value a function of 16 successive bits of it.
I and N are multiples of 128. The matrix may be a part of the stored one (`TrellisLayout`).

This module knows neither files nor the run-time form of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Formula = Literal["middle", "zeros", "minimums", "e4m3", "iq4_nl", "mxfp4"]

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Table of GGML's types IQ4_NL and IQ4_XS."""

MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit floats of MXFP4 (OCP Microscaling Formats 1.0, E2M1)."""

EXPONENT_BIAS = 127
"""Bias of the scales of MXFP4, which are exponents of 2 (E8M0)."""

NO_EXPONENT = 255
"""Scale of MXFP4 that is NaN."""

NUMBER_BITS: dict[Formula, int] = {"e4m3": 8, "iq4_nl": 4, "mxfp4": 4}
"""Formulas whose codes stand for other numbers than integers, and their bit width."""

Packing = Literal["words", "bytes", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]

WIDTHS = (2, 3, 4, 5, 6, 8)

Codebook = Literal["3inst", "mcg", "mul1"]
"""Values of the states of a trellis: `formats/codecs/exl3/layout.py` has the formulas."""

CODEBOOKS: tuple[Codebook, ...] = ("3inst", "mcg", "mul1")
TRELLIS_RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
TILE = 16
"""Rows and columns of a tile of trellis codes."""

HADAMARD = 128
"""Rows of the Hadamard matrices around trellis codes."""

FILL_STEP = 32
"""Every table can fill ranges of columns that begin at a multiple of this (some at finer steps),
except of trellis codes (`fill_step` of the layouts)."""

BLOCK_ROWS = 32
"""Op tables round groups up to a multiple of this many rows. Some keep smaller groups of integers
as they are (`LinearOps.min_group_rows`)."""

_PANEL_COLUMNS = 16  # op tables round matrices up to a multiple of this many columns


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayout:
    """Layout of dense weights of `dtype`: float32, float16 or bfloat16."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    has_bias: bool = False

    @property
    def fill_step(self) -> int:
        return FILL_STEP

    def size_bytes(
        self,
        min_group_rows: int = BLOCK_ROWS,  # noqa: ARG002 - has no groups
        *,
        has_factors: bool = False,  # noqa: ARG002
    ) -> int:
        """Bytes in an op table's memory, without the bias."""
        return self.out_features * self.in_features * self.dtype.itemsize


class GroupRun(NamedTuple):
    """Consecutive groups with the same bit width and size; a shorter last group is its own run."""

    bits: int
    groups: int
    rows: int  # rows per group


@dataclass(frozen=True, slots=True, eq=False)
class GroupedLayout:
    """Layout of a matrix [in_features, out_features] of grouped codes.

    `features` is int32 [in_features]; None means that stored row r is input feature r.
    `scale_dtype` is float16 or float32 and applies to minimums too; zeros are uint8. That of mxfp4
    is uint8, without `NO_EXPONENT`. `factor_rows`: rows that share the factors of their scales, if
    columns have `ScaleParts`; otherwise 0.
    """

    out_features: int
    in_features: int
    runs: tuple[GroupRun, ...]
    features: Tensor | None
    scale_dtype: torch.dtype
    formula: Formula
    has_bias: bool = False
    factor_rows: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Range of the weights: no op rounds them to a smaller one before it multiplies."""
        return torch.float32

    @property
    def fill_step(self) -> int:
        return FILL_STEP

    @property
    def num_groups(self) -> int:
        return sum(run.groups for run in self.runs)

    @property
    def has_integers(self) -> bool:
        """Whether the codes stand for integers."""
        return self.formula not in NUMBER_BITS

    @property
    def offset_dtype(self) -> torch.dtype | None:
        """Dtype of the offsets; None if the formula has none."""
        return {"zeros": torch.uint8, "minimums": self.scale_dtype}.get(self.formula)

    def size_bytes(self, min_group_rows: int = BLOCK_ROWS, *, has_factors: bool = False) -> int:
        """Bytes in the memory of an op table with this `min_group_rows`, without the bias and the
        order of the rows. `has_factors`: it keeps `ScaleParts`, with factors once per 128 rows."""
        columns = -(-self.out_features // _PANEL_COLUMNS) * _PANEL_COLUMNS
        if has_factors and self.factor_rows:
            code_bits = sum(run.bits * run.groups * run.rows for run in self.runs)
            factor_bytes = self.in_features // 128 * (4 if self.formula == "minimums" else 2)
            return columns * (code_bits // 8 + self.num_groups + factor_bytes)
        code_bits = sum(self._padded_rows(run, min_group_rows) * run.bits for run in self.runs)
        offset_bytes = 0 if self.offset_dtype is None else self.offset_dtype.itemsize
        group_bytes = self.scale_dtype.itemsize + offset_bytes
        return columns * (code_bits // 8 + self.num_groups * group_bytes)

    def _padded_rows(self, run: GroupRun, min_group_rows: int) -> int:
        is_small = run.rows < BLOCK_ROWS and run.rows % min_group_rows == 0
        if is_small and self.has_integers:  # groups share blocks
            return -(-run.groups * run.rows // BLOCK_ROWS) * BLOCK_ROWS
        return run.groups * -(-run.rows // BLOCK_ROWS) * BLOCK_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class TrellisLayout:
    """Layout of a matrix [in_features, out_features] of trellis codes.

    The matrix is a part of the stored one, from feature `first_in` and column `first_out` on. Both
    are below 128, and the stored matrix ends with the block of 128 of the last feature and column.
    Features of the stored matrix outside of the part have inputs of 0. Its other columns are
    dropped.

    `tile_words` is the number of 16-bit words of a tile: 16 times the bits per weight, which are
    `TRELLIS_RATES`. Rates with a half have the codebook mul1.
    """

    out_features: int
    in_features: int
    tile_words: int
    codebook: Codebook
    first_out: int = 0
    first_in: int = 0
    has_bias: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Range of the weights: no op rounds them to a smaller one before it multiplies."""
        return torch.float32

    @property
    def rate(self) -> float:
        """Bits per weight of the codes."""
        return self.tile_words / TILE

    @property
    def stored_in(self) -> int:
        """Features of the stored matrix, a multiple of 128."""
        return _up(self.first_in + self.in_features, HADAMARD)

    @property
    def stored_out(self) -> int:
        """Columns of the stored matrix, a multiple of 128."""
        return _up(self.first_out + self.out_features, HADAMARD)

    @property
    def fill_step(self) -> int:
        """A matrix is filled at once, because its parts are no columns."""
        return self.out_features

    def size_bytes(
        self,
        min_group_rows: int = BLOCK_ROWS,  # noqa: ARG002 - has no groups
        *,
        has_factors: bool = False,  # noqa: ARG002
    ) -> int:
        """Bytes in an op table's memory, without the bias."""
        tiles = (self.stored_in // TILE) * (self.stored_out // TILE)
        return 2 * (tiles * self.tile_words + self.stored_in + self.stored_out)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


WeightLayout = DenseLayout | GroupedLayout | TrellisLayout


def fused_layout(layouts: Sequence[WeightLayout]) -> WeightLayout | None:
    """Layout of one matrix whose outputs are those of all `layouts`; None if there is none.

    Dense matrices that differ only in their number of outputs can be fused. Others are filled
    one by one, and joined (`LinearOps.join`).
    """
    first, *others = layouts
    if not others:
        return first
    dense = [layout for layout in layouts if isinstance(layout, DenseLayout)]
    kinds = {(layout.in_features, layout.dtype, layout.has_bias) for layout in dense}
    if len(dense) < len(layouts) or len(kinds) > 1:
        return None
    return replace(dense[0], out_features=sum(layout.out_features for layout in dense))


@dataclass(frozen=True, slots=True, eq=False)
class DenseColumns:
    """Some columns of a dense matrix: `weight` [columns, in_features], contiguous, in the layout's
    dtype. `bias` is float32 [columns]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScaleParts:
    """Scales of groups of 16 rows as products.

    `factors` float16 [rows / factor_rows, columns] times `multipliers` uint8 [groups, columns].

    With the formula middle, a multiplier is a signed byte. With minimums it is the low half of the
    byte, and the offset is minus the product of the high half and `minimum_factors`, which are like
    `factors`.
    """

    factors: Tensor
    multipliers: Tensor
    minimum_factors: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupedColumns:
    """Some columns of a matrix of grouped codes as stored in a file.

    `codes` by packing:

    - words: int32 [words, columns]. Each column is a bit stream of the codes of all stored rows,
      lowest bits first (`formats/codecs/bits.py`). Rows of the tensor may be strided.
    - bytes: uint8 [in_features, columns], one code per byte. Rows of the tensor may be strided.
    - q4_0 and the other GGML names: uint8 [columns, bytes per column], blocks of 32 codes that
      contain their scales.

    `source_rows`, int32 [in_features], gives the row of `codes` that holds each stored row; None
    means the same row. `scales` and `offsets` are [groups, columns]. `offsets` is None if the
    layout's formula has none. Both are None for GGML blocks. `bias` is float32 [columns].
    `parts` has the same scales and offsets as products, if the layout has `factor_rows`.
    """

    packing: Packing
    codes: Tensor
    source_rows: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    bias: Tensor | None = None
    parts: ScaleParts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrellisColumns:
    """All columns of a matrix of trellis codes as stored in a file.

    words       int16 [stored_in / 16, stored_out / 16, tile_words]: the rings of the tiles
    in_scales   float16 [stored_in], with signs
    out_scales  float16 [stored_out], with signs
    bias        float32 [out_features]

    Rows of `words` may be strided. The bits of a ring: `formats/codecs/exl3/layout.py`.
    """

    words: Tensor
    in_scales: Tensor
    out_scales: Tensor
    bias: Tensor | None = None


WeightColumns = DenseColumns | GroupedColumns | TrellisColumns

_TENSORS = {
    DenseColumns: ("weight", "bias"),
    GroupedColumns: ("codes", "source_rows", "scales", "offsets", "bias"),
    TrellisColumns: ("words", "in_scales", "out_scales", "bias"),
}


def moved_columns(
    all_columns: Sequence[WeightColumns], move_all: Callable[[Sequence[Tensor]], list[Tensor]]
) -> list[WeightColumns]:
    """The same columns with all of their tensors moved by one call (`parts` stay)."""
    fields: list[tuple[int, str]] = []
    tensors: list[Tensor] = []
    for index, columns in enumerate(all_columns):
        for name in _TENSORS[type(columns)]:
            tensor = getattr(columns, name)
            if tensor is not None:
                fields.append((index, name))
                tensors.append(tensor)
    moved: list[dict[str, Tensor]] = [{} for _ in all_columns]
    for (index, name), tensor in zip(fields, move_all(tensors), strict=True):
        moved[index][name] = tensor
    return [
        replace(columns, **changes)  # type: ignore[arg-type] # fields of its own class
        for columns, changes in zip(all_columns, moved, strict=True)
    ]
