"""Quantized matrices of the reference table: one byte per code, dequantized in float64.

Unpacks columns from the description in `quantized.py` alone and shares no code with the codecs, so
that the same mistake cannot cancel on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from exl_core.ops.checks import OpInputError, check, check_contiguous, check_range
from exl_core.ops.linear import LayoutSizes
from exl_core.ops.weights import (
    EXPONENT_BIAS,
    IQ4_NL,
    MXFP4,
    NUMBER_BITS,
    WIDTHS,
    Formula,
    GroupedColumns,
    GroupedLayout,
    Packing,
)

SCALE_TYPES = (torch.float16, torch.float32)
PANEL = 16  # columns; filling begins at whole panels only
BLOCK_ROWS = 32


class _BlockFormat(NamedTuple):
    """A GGML block: a scale, in some formats a minimum, in some high bits, then the codes."""

    bits: int
    has_minimum: bool

    @property
    def bytes(self) -> int:
        return 2 + 2 * self.has_minimum + BLOCK_ROWS * self.bits // 8


BLOCKS: dict[Packing, _BlockFormat] = {
    "q4_0": _BlockFormat(4, False),
    "q4_1": _BlockFormat(4, True),
    "q5_0": _BlockFormat(5, False),
    "q5_1": _BlockFormat(5, True),
    "q8_0": _BlockFormat(8, False),
}


class _Parts(NamedTuple):
    """Unpacked columns: codes uint8 [k, columns], scales and offsets [groups, columns]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PlainQuantized(LayoutSizes[GroupedLayout]):
    """A quantized matrix: codes uint8 [k, n] in stored order, scales and offsets [groups, n]."""

    layout: GroupedLayout
    row_bits: Tensor  # [k]
    row_groups: Tensor  # [k]
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bias: Tensor | None

    @property
    def size_bytes(self) -> int:
        held = (self.codes, self.scales, self.offsets, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def matrix(self) -> Tensor:
        """The weights, float64 [n, k], by the formulas of `quantized.py`."""
        codes = self.codes.double()  # [k, n]
        scales = self.scales.double()[self.row_groups]
        if self.layout.formula == "e4m3":
            stored = scales * self.codes.view(torch.float8_e4m3fn).double()
        elif self.layout.formula == "iq4_nl":
            stored = scales * torch.tensor(IQ4_NL).double()[self.codes.long()]
        elif self.layout.formula == "mxfp4":
            stored = torch.ldexp(
                torch.tensor(MXFP4).double()[self.codes.long()], scales - EXPONENT_BIAS
            )
        elif self.offsets is None:
            stored = scales * (codes - 2.0 ** (self.row_bits[:, None] - 1))
        elif self.layout.formula == "zeros":
            stored = scales * (codes - self.offsets.double()[self.row_groups])
        else:
            stored = scales * codes + self.offsets.double()[self.row_groups]
        if self.layout.features is None:
            return stored.T
        weights = torch.empty_like(stored)
        weights[self.layout.features.long()] = stored
        return weights.T


def new_grouped(layout: GroupedLayout) -> PlainQuantized:
    _check_layout(layout)
    n, k, groups = layout.out_features, layout.in_features, layout.num_groups
    offset_dtype = layout.offset_dtype
    bits = [run.bits for run in layout.runs for _ in range(run.groups * run.rows)]
    sizes = [run.rows for run in layout.runs for _ in range(run.groups)]
    return PlainQuantized(
        layout,
        torch.tensor(bits),
        torch.arange(groups).repeat_interleave(torch.tensor(sizes)),
        torch.zeros(k, n, dtype=torch.uint8),
        torch.zeros(groups, n, dtype=layout.scale_dtype),
        None if offset_dtype is None else torch.zeros(groups, n, dtype=offset_dtype),
        torch.zeros(n) if layout.has_bias else None,
    )


def fill_grouped(w: PlainQuantized, first_column: int, columns: GroupedColumns) -> None:
    codes = columns.codes
    if not isinstance(codes, Tensor) or codes.ndim != 2:
        raise OpInputError("fill_linear: codes (expected a matrix)")
    count = codes.shape[0 if columns.packing in BLOCKS else 1]
    last = first_column + count
    is_whole = first_column % PANEL == 0 and (count % PANEL == 0 or last == w.out_features)
    if not is_whole or not 0 <= first_column < last <= w.out_features:
        raise OpInputError(
            f"fill_linear: first_column (expected whole panels of {PANEL} columns within"
            f" [0, {w.out_features}), got {count} at {first_column})"
        )
    _check_scales_and_bias(w, columns, count)
    parts = (
        _parts_of_blocks(w, columns) if columns.packing in BLOCKS else _parts_of_codes(w, columns)
    )
    rows = parts.codes
    if columns.source_rows is not None:
        check("fill_linear", "source_rows", columns.source_rows, (torch.int32,), w.in_features)
        check_range("fill_linear", "source_rows", columns.source_rows, w.in_features)
        rows = rows[columns.source_rows.long()]
    w.codes[:, first_column:last] = rows
    w.scales[:, first_column:last] = parts.scales
    if w.offsets is not None and parts.offsets is not None:
        w.offsets[:, first_column:last] = parts.offsets
    if w.bias is not None and columns.bias is not None:
        w.bias[first_column:last] = columns.bias


def _check_layout(layout: GroupedLayout) -> None:
    op = "new_linear"
    if layout.out_features < 1 or layout.in_features < 1:
        raise OpInputError(f"{op}: {layout.out_features} x {layout.in_features}")
    for run in layout.runs:
        if run.bits not in WIDTHS or run.groups < 1 or run.rows < 1:
            raise OpInputError(f"{op}: runs (expected widths of {WIDTHS}, got {run})")
    rows = sum(run.groups * run.rows for run in layout.runs)
    if rows != layout.in_features:
        raise OpInputError(f"{op}: runs (expected {layout.in_features} rows, got {rows})")
    if layout.formula not in get_args(Formula):
        raise OpInputError(f"{op}: formula (got {layout.formula})")
    types = (torch.uint8,) if layout.formula == "mxfp4" else SCALE_TYPES
    if layout.scale_dtype not in types:
        raise OpInputError(f"{op}: scale_dtype (expected {types}, got {layout.scale_dtype})")
    bits = NUMBER_BITS.get(layout.formula)
    if bits is not None and any(run.bits != bits for run in layout.runs):
        raise OpInputError(f"{op}: formula ({layout.formula} needs codes of {bits} bits)")
    if layout.features is not None:
        check(op, "features", layout.features, (torch.int32,), layout.in_features)
        if not torch.equal(layout.features.sort().values, torch.arange(layout.in_features).int()):
            raise OpInputError(f"{op}: features (expected every input feature once)")


def _check_scales_and_bias(w: PlainQuantized, columns: GroupedColumns, count: int) -> None:
    """Checks that scales, offsets and bias are present exactly if layout and packing need them."""
    op, groups = "fill_linear", w.layout.num_groups
    in_blocks = columns.packing in BLOCKS
    offset_dtype = w.layout.offset_dtype or w.layout.scale_dtype
    for name, tensor, dtype, wanted in (
        ("scales", columns.scales, w.layout.scale_dtype, not in_blocks),
        ("offsets", columns.offsets, offset_dtype, w.offsets is not None and not in_blocks),
    ):
        if (tensor is not None) != wanted:
            raise OpInputError(f"{op}: {name} (expected {'some' if wanted else 'none'})")
        if tensor is not None:
            check(op, name, tensor, (dtype,), groups, count)
            check_contiguous(op, name, tensor)
    if (columns.bias is None) != (w.bias is None):
        raise OpInputError(f"{op}: bias (expected one exactly if the matrix has one)")
    if columns.bias is not None:
        check(op, "bias", columns.bias, (torch.float32,), count)
        check_contiguous(op, "bias", columns.bias)


def _parts_of_codes(w: PlainQuantized, columns: GroupedColumns) -> _Parts:
    op, codes, bits = "fill_linear", columns.codes, w.row_bits
    if columns.packing == "bytes":
        check(op, "codes", codes, (torch.uint8,), w.in_features, None)
        rows = codes
    elif columns.packing == "words":
        if columns.source_rows is not None and len(set(bits.tolist())) > 1:
            raise OpInputError(f"{op}: source_rows (expected none where widths are mixed)")
        check(op, "codes", codes, (torch.int32,), -(-int(bits.sum()) // 32), None)
        rows = _codes_of_words(codes, bits)
    else:
        raise OpInputError(f"{op}: packing (got {columns.packing})")
    check_contiguous(op, "codes", codes, 1)
    if bool((rows >= 2 ** bits[:, None]).any()):
        raise OpInputError(f"{op}: codes (expected none beyond their width)")
    assert columns.scales is not None, "checked before"
    return _Parts(rows, columns.scales, columns.offsets)


def _codes_of_words(words: Tensor, bits: Tensor) -> Tensor:
    """Unpacks the codes of all rows from the bit streams of their columns."""
    start = bits.cumsum(0) - bits  # [k]: first bit of each row's code
    word, shift = start // 32, start % 32
    wide = words.long() & 0xFFFFFFFF
    wide = torch.cat([wide, torch.zeros_like(wide[:1])])  # the last code may end with the stream
    pair = wide[word] | wide[word + 1] << 32  # [k, columns]
    return ((pair >> shift[:, None]) & (2 ** bits[:, None] - 1)).to(torch.uint8)


def _parts_of_blocks(w: PlainQuantized, columns: GroupedColumns) -> _Parts:
    """Unpacks GGML blocks of 32 rows. Low 4-bit halves hold rows 0..15, high halves rows 16..31."""
    op, layout, block = "fill_linear", w.layout, BLOCKS[columns.packing]
    runs = {(run.bits, run.rows) for run in layout.runs}
    formula = "minimums" if block.has_minimum else "middle"
    if (
        runs != {(block.bits, BLOCK_ROWS)}
        or layout.formula != formula
        or layout.scale_dtype != torch.float16
        or columns.source_rows is not None
    ):
        raise OpInputError(f"{op}: packing (a layout that {columns.packing} does not fit)")
    groups = layout.num_groups
    check(op, "codes", columns.codes, (torch.uint8,), None, groups * block.bytes)
    check_contiguous(op, "codes", columns.codes, 1)
    blocks = columns.codes.reshape(-1, groups, block.bytes)  # [columns, groups, bytes]
    heads = 2 if block.has_minimum else 1
    factors = blocks[..., : 2 * heads].contiguous().view(torch.float16)  # [columns, groups, heads]
    rest = blocks[..., 2 * heads :].long()
    if block.bits == 8:
        codes = (rest + 128) % 256  # stored as signed bytes
    else:
        nibbles = rest[..., -16:]
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
        if block.bits == 5:
            which = torch.arange(BLOCK_ROWS)
            codes = codes | (rest[..., :4][..., which // 8] >> which % 8 & 1) << 4
    return _Parts(
        codes.flatten(1).T.to(torch.uint8),
        factors[..., 0].T,
        factors[..., 1].T if block.has_minimum else None,
    )
