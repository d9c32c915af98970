"""Matrices of trellis codes of the reference table: the words as stored, decoded bit by bit.

Follows the description in `ops/weights.py` and `formats/codecs/exl3/layout.py` with lists of single
bits, and shares no code with the codec, so that the same mistake cannot cancel on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from exl_core.ops.checks import OpInputError, check, check_contiguous
from exl_core.ops.linear import LayoutSizes
from exl_core.ops.weights import (
    CODEBOOKS,
    HADAMARD,
    TILE,
    TRELLIS_RATES,
    Codebook,
    TrellisColumns,
    TrellisLayout,
)


@dataclass(frozen=True, slots=True, eq=False)
class PlainTrellis(LayoutSizes[TrellisLayout]):
    """A matrix of trellis codes as stored, bias float32 [out_features]."""

    layout: TrellisLayout
    words: Tensor
    in_scales: Tensor
    out_scales: Tensor
    bias: Tensor | None

    @property
    def size_bytes(self) -> int:
        held = (self.words, self.in_scales, self.out_scales, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def matrix(self) -> Tensor:
        """The weights, float64 [n, k]."""
        layout = self.layout
        values = _decoded(self.words, layout.rate, layout.codebook)
        rotation = _rotation()
        blocks = values.view(-1, HADAMARD, layout.stored_out)  # [blocks, 128, columns]
        rotated = (rotation @ blocks).view(layout.stored_in, -1, HADAMARD) @ rotation
        rotated = rotated.view(layout.stored_in, layout.stored_out)
        stored = self.in_scales.double()[:, None] * rotated * self.out_scales.double()
        rows = slice(layout.first_in, layout.first_in + layout.in_features)
        columns = slice(layout.first_out, layout.first_out + layout.out_features)
        weights: Tensor = stored[rows, columns].T
        return weights


def new_trellis(layout: TrellisLayout) -> PlainTrellis:
    check_trellis_layout(layout)
    rows, columns = layout.stored_in, layout.stored_out
    return PlainTrellis(
        layout,
        torch.zeros(rows // TILE, columns // TILE, layout.tile_words, dtype=torch.int16),
        torch.zeros(rows, dtype=torch.float16),
        torch.zeros(columns, dtype=torch.float16),
        torch.zeros(layout.out_features) if layout.has_bias else None,
    )


def fill_trellis(w: PlainTrellis, first_column: int, columns: TrellisColumns) -> None:
    check_trellis_columns(w.layout, first_column, columns)
    w.words.copy_(columns.words)
    w.in_scales.copy_(columns.in_scales)
    w.out_scales.copy_(columns.out_scales)
    if w.bias is not None and columns.bias is not None:
        w.bias.copy_(columns.bias)


def check_trellis_layout(layout: TrellisLayout) -> None:
    """Raises OpInputError for a layout that describes no matrix."""
    op = "new_linear"
    if layout.out_features < 1 or layout.in_features < 1:
        raise OpInputError(f"{op}: {layout.out_features} x {layout.in_features}")
    if not 0 <= layout.first_out < HADAMARD or not 0 <= layout.first_in < HADAMARD:
        raise OpInputError(
            f"{op}: first_out, first_in (expected 0 .. {HADAMARD - 1}, got {layout.first_out},"
            f" {layout.first_in})"
        )
    if layout.codebook not in CODEBOOKS:
        raise OpInputError(f"{op}: codebook (got {layout.codebook})")
    is_half = layout.rate != int(layout.rate)
    if layout.rate not in TRELLIS_RATES or (is_half and layout.codebook != "mul1"):
        raise OpInputError(
            f"{op}: tile_words (got {layout.tile_words} with codebook {layout.codebook})"
        )


def check_trellis_columns(
    layout: TrellisLayout, first_column: int, columns: TrellisColumns
) -> None:
    """Raises OpInputError unless these are all columns of a matrix with this layout."""
    op, rows, outputs = "fill_linear", layout.stored_in, layout.stored_out
    if first_column != 0:
        raise OpInputError(f"{op}: first_column (expected 0 with trellis codes)")
    shape = (rows // TILE, outputs // TILE, layout.tile_words)
    check(op, "words", columns.words, (torch.int16,), *shape)
    check(op, "in_scales", columns.in_scales, (torch.float16,), rows)
    check(op, "out_scales", columns.out_scales, (torch.float16,), outputs)
    if (columns.bias is None) == layout.has_bias:
        raise OpInputError(f"{op}: bias (expected one exactly if the matrix has one)")
    if columns.bias is not None:
        check(op, "bias", columns.bias, (torch.float32,), layout.out_features)
        check_contiguous(op, "bias", columns.bias)


@cache
def _rotation() -> Tensor:
    """The normalized Hadamard matrix, by its formula, float64 [128, 128]."""
    index = torch.arange(HADAMARD)
    common = index[:, None] & index
    ones = sum((common >> bit & 1 for bit in range(7)), torch.zeros_like(common))
    return torch.where(ones % 2 == 1, -1.0, 1.0).double() / math.sqrt(HADAMARD)


@cache
def _values(codebook: Codebook) -> Tensor:
    """Values of all states, float64."""
    state = torch.arange(1 << 16)
    if codebook == "mul1":
        product = state * 0x83DCD12D & 0xFFFFFFFF
        halves = product % 65536, product // 65536
        total = sum((half % 256 + half // 256 for half in halves), torch.zeros_like(state))
        return (1774 * 2.0**-18 * (1024 + total).double() - 1329 / 128).half().double()
    product = state * 0xCBAC1FED if codebook == "mcg" else state * 89226354 + 64248484
    product &= 0xFFFFFFFF
    parts = [_half((product >> shift) % 65536) for shift in (0, 16)]
    return (parts[0] + parts[1]).half().double()


def _half(word: Tensor) -> Tensor:
    """A float16 number with the sign, the two lowest exponent bits and the mantissa that the word
    gives, each combined with those of 0x3B60."""
    word = word & 0x8FFF ^ 0x3B60
    sign, exponent, mantissa = word >> 15, word >> 10 & 31, word & 1023
    significand: Tensor = (1 - 2 * sign) * (1 + mantissa.double() / 1024)
    value: Tensor = torch.ldexp(significand, exponent - 15)
    return value


def _decoded(words: Tensor, rate: float, codebook: Codebook) -> Tensor:
    """The rotated matrix, float64 [rows, columns]."""
    tile_rows, tile_columns, _ = words.shape
    order = words.reshape(tile_rows, tile_columns, -1, 2).flip(-1).flatten(-2).int() & 0xFFFF
    bits = (order[..., None] >> torch.arange(15, -1, -1) & 1).flatten(-2)  # [.., 256 rate]
    out = torch.empty(tile_rows, TILE, tile_columns, TILE, dtype=torch.float64)
    end = 0
    for position in range(TILE * TILE):
        end += int(rate) + (position % 2 if rate != int(rate) else 0)
        window = bits[..., torch.arange(end - 16, end) % bits.shape[-1]]
        state = (window.long() << torch.arange(15, -1, -1)).sum(-1)
        lane, j = divmod(position, 8)
        row = 2 * (lane % 4) + j % 2 + 8 * (j // 2 % 2)
        out[:, row, :, lane // 4 + 8 * (j // 4)] = _values(codebook)[state]
    return out.view(tile_rows * TILE, tile_columns * TILE)
