"""Random quantized matrices, their exact weights, and error bounds of products with them.

Shares no code with the backends or the codecs: weights come from the formulas, packed words from
the bits of numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from kernel_support import UNIT, assert_near
from torch import Tensor

from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable
from exl_core.ops.weights import Formula, GroupedColumns, GroupedLayout, GroupRun
from support.runtime_form import NUMBERS

SPAN = 128  # most stored rows that share one scale of their activations
FEW_STEP = 0.51 / 32512  # half a step of 16-bit integers, relative to the largest of a span
TILE_STEP = 0.51 / 2032  # half a step of 12-bit integers
BF16 = 2.0**-8  # half a unit in the last place: 8 significant bits
TINY = 2.0**-110  # smaller activations may count as zero
TILE_SETS = ("cpu-amx",)  # other sets use 16-bit integers, or float32, for any number of rows
FEW_ROWS = 4  # most rows that TILE_SETS multiply as 16-bit integers
TILE_ROWS = 32  # most rows that TILE_SETS multiply as 12-bit integers; bfloat16 above
# A GPU rounds inputs to float16, which changes each by 2^-11 / sqrt(3), about 3e-4 in all. Its
# small-batch kernel rounds weights as well.
GPU_BOUND = 2e-3


@dataclass(frozen=True)
class Shape:
    """Parameters of a random matrix."""

    runs: tuple[tuple[int, int, int], ...]  # bits, groups, rows
    n: int
    formula: Formula = "middle"
    scale_dtype: torch.dtype = torch.float16  # uint8 for mxfp4
    permuted: bool = False
    has_bias: bool = False

    @property
    def k(self) -> int:
        return sum(groups * rows for _, groups, rows in self.runs)

    def __str__(self) -> str:
        runs = "+".join(f"{bits}b{groups}x{rows}" for bits, groups, rows in self.runs)
        scales = str(self.scale_dtype).removeprefix("torch.float")
        extras = "-permuted" * self.permuted + "-bias" * self.has_bias
        return f"{runs}-n{self.n}-{self.formula}-{scales}{extras}"


@dataclass(frozen=True, eq=False)
class Matrix:
    """A quantized matrix with codes of one byte: uint8 [k, n] in stored order."""

    layout: GroupedLayout
    row_bits: Tensor  # [k]
    row_groups: Tensor  # [k]
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bias: Tensor | None

    @property
    def features(self) -> Tensor:
        """Input feature of each stored row, int64."""
        if self.layout.features is None:
            return torch.arange(self.layout.in_features)
        return self.layout.features.long()

    def by_feature(self, stored: Tensor) -> Tensor:
        """[k, n] in stored order -> [n, k]."""
        return torch.empty_like(stored).index_copy_(0, self.features, stored).T

    def row_scales(self) -> Tensor:
        """float64 [k, n] in stored order."""
        scales = self.scales.double()[self.row_groups]
        return 2.0 ** (scales - 127) if self.layout.formula == "mxfp4" else scales

    def weights(self) -> Tensor:
        """float64 [n, k]."""
        scales, codes = self.row_scales(), self.codes.double()
        if not self.layout.has_integers:
            numbers = torch.from_numpy(NUMBERS[self.layout.formula])
            return self.by_feature(scales * numbers[self.codes.long()])
        if self.offsets is None:
            return self.by_feature(scales * (codes - 2.0 ** (self.row_bits[:, None] - 1)))
        offsets = self.offsets.double()[self.row_groups]
        if self.layout.formula == "zeros":
            return self.by_feature(scales * (codes - offsets))
        return self.by_feature(scales * codes + offsets)

    def magnitudes(self) -> Tensor:
        """|w|; for minimums |scale * code| + |minimum|, which is at least |w|. float64 [n, k]."""
        if self.layout.formula != "minimums" or self.offsets is None:
            return self.weights().abs()
        terms = self.scales.double()[self.row_groups].abs() * self.codes.double()
        return self.by_feature(terms + self.offsets.double()[self.row_groups].abs())

    def step_errors(self, x: Tensor, step: float = FEW_STEP) -> Tensor:
        """Largest error of each activation when it is rounded to integers: float64 [m, k]."""
        stored = x.double().abs()[:, self.features]
        errors = torch.empty_like(stored)
        first = 0
        for size in torch.bincount(self.row_groups).tolist():
            for start in range(first, first + size, SPAN):
                span = slice(start, min(start + SPAN, first + size))
                errors[:, span] = stored[:, span].amax(1, keepdim=True) * step + TINY
            first += size
        by_feature = torch.empty_like(errors)
        by_feature[:, self.features] = errors
        return by_feature


def spread_codes(rng: torch.Generator, bits: Tensor, n: int) -> Tensor:
    """Random codes of the given widths. A tenth of them are the smallest or the largest."""
    top = (2 ** bits[:, None] - 1).expand(-1, n)
    codes = (torch.rand(top.shape, generator=rng) * (top + 1)).floor().long().clamp_max(top)
    extreme = torch.rand(top.shape, generator=rng)
    codes = torch.where(extreme < 0.05, torch.zeros_like(codes), codes)
    return torch.where(extreme > 0.95, top, codes).to(torch.uint8)


def make_matrix(rng: torch.Generator, shape: Shape) -> Matrix:
    runs = tuple(GroupRun(*run) for run in shape.runs)
    k, n = shape.k, shape.n
    sizes = torch.tensor([run.rows for run in runs for _ in range(run.groups)])
    widths = torch.tensor([run.bits for run in runs for _ in range(run.groups)])
    bits = widths.repeat_interleave(sizes)
    groups = len(sizes)
    features = torch.randperm(k, generator=rng).int() if shape.permuted else None
    layout = GroupedLayout(n, k, runs, features, shape.scale_dtype, shape.formula, shape.has_bias)
    sign = torch.where(torch.rand(groups, n, generator=rng) < 0.2, -1.0, 1.0)
    scales = sign * (0.2 + torch.rand(groups, n, generator=rng)) / 2 ** widths[:, None]
    offsets = None
    if shape.formula == "zeros":
        offsets = spread_codes(rng, widths, n)
    elif shape.formula == "minimums":
        offsets = (torch.randn(groups, n, generator=rng) * 0.5).to(shape.scale_dtype)
    codes = spread_codes(rng, bits, n)
    if shape.formula == "mxfp4":  # exponents; the sign is in the codes
        scales = torch.randint(121, 126, scales.shape, generator=rng)
    if shape.formula == "e4m3":
        codes[(codes & 0x7F) == 0x7F] -= 1  # no NaN; the largest number instead
    return Matrix(
        layout,
        bits,
        torch.arange(groups).repeat_interleave(sizes),
        codes,
        scales.to(shape.scale_dtype),
        offsets,
        torch.randn(n, generator=rng) if shape.has_bias else None,
    )


def words_of(codes: Tensor, bits: Tensor) -> Tensor:
    """Bit stream of each column, int32 [words, n]."""
    planes = [
        (codes[row].numpy()[None] >> np.arange(width)[:, None]) & 1
        for row, width in enumerate(bits.tolist())
    ]
    stream = np.concatenate(planes).astype(np.uint8)  # [bits, n]
    padding = -len(stream) % 32
    stream = np.concatenate([stream, np.zeros((padding, stream.shape[1]), np.uint8)])
    packed = np.packbits(stream, axis=0, bitorder="little")  # [bytes, n]
    return torch.from_numpy(np.ascontiguousarray(packed.T).view("<i4").T.copy())


def columns_of(
    matrix: Matrix, first: int, last: int, packing: Literal["bytes", "words"] = "bytes"
) -> GroupedColumns:
    """Columns first .. last - 1 as in a file: views with gaps between rows."""

    def part(grid: Tensor | None) -> Tensor | None:
        return None if grid is None else grid[:, first:last].contiguous()

    codes = matrix.codes if packing == "bytes" else words_of(matrix.codes, matrix.row_bits)
    scales = part(matrix.scales)
    assert scales is not None
    return GroupedColumns(
        packing,
        codes[:, first:last],
        None,
        scales,
        part(matrix.offsets),
        None if matrix.bias is None else matrix.bias[first:last].clone(),
    )


def filled(table: OpTable, matrix: Matrix) -> PackedLinear:
    w = table.new_linear(matrix.layout)
    table.fill_linear(w, 0, columns_of(matrix, 0, matrix.layout.out_features))
    return w


@dataclass(frozen=True)
class Answer:
    """x @ w (+ bias) in float64, the error bound of a kernel, and the sum of |terms|."""

    exact: Tensor
    bound: Tensor
    terms: Tensor


def answer(table: OpTable, matrix: Matrix, x: Tensor, x_error: float = 0.0) -> Answer:
    """`x_error` is a relative error of x before the product."""
    x64, weights, sizes = x.double(), matrix.weights(), matrix.magnitudes()
    exact, terms = x64 @ weights.T, x64.abs() @ sizes.T
    if matrix.bias is not None:
        exact, terms = exact + matrix.bias, terms + matrix.bias.abs()
    # Sums within a span may hold code and zero point apart, hence up to twice the terms.
    codes = matrix.by_feature(matrix.row_scales().abs() * 2.0 ** matrix.row_bits[:, None])
    if matrix.layout.formula in ("iq4_nl", "mxfp4"):  # 8-bit integers from a table
        codes = codes * 16
    base = x64.abs() @ (codes + sizes).T + terms
    bound = (x.shape[1] + 16) * UNIT * base + x_error * terms + matrix.step_errors(x) @ sizes.T
    is_e4m3 = matrix.layout.formula == "e4m3"  # as bfloat16 for more than 8 rows
    if table.name in TILE_SETS and (x.shape[0] > TILE_ROWS or is_e4m3):
        bound = bound + (2 * BF16 + BF16**2) * terms
    elif table.name in TILE_SETS and x.shape[0] > FEW_ROWS:
        bound = bound + matrix.step_errors(x, TILE_STEP) @ sizes.T
    return Answer(exact, bound, terms)


def assert_product(table: OpTable, got: Tensor, right: Answer) -> None:
    assert_near(table, got, right.exact, right.bound, GPU_BOUND)
