"""Slices of matrices: the columns and rows that one rank of tensor parallelism holds.

A column slice has some outputs of a matrix. A row slice has some of its input features, and the sum
of all ranks' products is the whole product. A slice of a quantized matrix keeps the codes, scales
and roundings of the file:

    stored rows   0 1 2 3 | 4 5 6 7 | 8 9         groups of 4, features in any order (act-order)
    kept          . 1 2 .   4 5 6 7   . .    ->   groups of 4 and 2, features 0 .. 5 in their order

A group that is cut keeps its scale in every slice that has rows of it. With act-order the groups of
a slice are stored by width and size. Local features are numbered
in ascending order of the model's features, so the columns of gate and up that belong to the rows of
a slice of `down` are in file order.

A slice of trellis codes has all blocks of 128 stored rows and columns that contain one of its own,
because the Hadamard transforms mix these. Its rows and columns are consecutive.

This module knows neither models, nor which rank gets which features beyond `deal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl_core.errors import UnsupportedModelError
from exl_core.formats.codecs import bits
from exl_core.formats.codecs.runtime import Move, RuntimeMatrix, stay
from exl_core.ops.weights import (
    FILL_STEP,
    HADAMARD,
    TILE,
    DenseColumns,
    DenseLayout,
    GroupedColumns,
    GroupedLayout,
    GroupRun,
    ScaleParts,
    TrellisColumns,
    TrellisLayout,
    WeightColumns,
    WeightLayout,
)

_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")  # packings that contain their scales
_BLOCK_ROWS = 32  # of a GGML block
_WORD_ROWS = 32  # stored rows whose codes fill whole words, at any width


@dataclass(frozen=True, slots=True, eq=False)
class RowSlice:
    """Rows of a matrix by the input features `features` (int64, ascending).

    layout  of the slice
    rows    int64: stored row of the whole matrix of each stored row of the slice
    groups  int64: group of the whole matrix of each group of the slice
    """

    layout: WeightLayout
    features: Tensor
    rows: Tensor
    groups: Tensor


def word_rows(layout: WeightLayout, rows: Tensor) -> Tensor | None:
    """Rows of packed words, int64, that hold the codes of these stored rows and no others. None if
    the rows are not whole blocks of 32 of one width."""
    if not isinstance(layout, GroupedLayout) or len(rows) % _WORD_ROWS:
        return None
    blocks = rows.view(-1, _WORD_ROWS)
    firsts, found = blocks[:, 0], []
    first_row = first_word = 0
    for run in layout.runs:
        count = run.groups * run.rows
        own = firsts[(firsts >= first_row) & (firsts < first_row + count)] - first_row
        if count % _WORD_ROWS or (own % _WORD_ROWS).any():
            return None
        words = own[:, None] // _WORD_ROWS * run.bits + torch.arange(run.bits)
        found.append(first_word + words.flatten())
        first_row, first_word = first_row + count, first_word + count * run.bits // _WORD_ROWS
    is_whole = torch.equal(blocks, firsts[:, None] + torch.arange(_WORD_ROWS))
    return torch.cat(found) if is_whole else None


def deal(layout: WeightLayout, shares: Sequence[int]) -> list[Tensor]:
    """Input features of each rank, int64, ascending. `shares` are the numbers of features.

    Codes of one width are dealt in ranges of stored rows: with act-order these are whole groups,
    except at the ends of a range. Where widths are mixed, each group goes to the rank that has the
    largest part of its share still free, so that all ranks get about the same bits.
    """
    assert sum(shares) == layout.in_features, "the shares are those of this matrix"
    grouped = layout if isinstance(layout, GroupedLayout) else None
    if grouped is None or len({run.bits for run in grouped.runs}) < 2:
        rows = list(torch.arange(layout.in_features).split_with_sizes(list(shares)))
    else:
        rows = _dealt_groups(grouped, shares)
    features = None if grouped is None else grouped.features
    if features is None:
        return rows
    return [features[own].long().sort().values for own in rows]


def _dealt_groups(layout: GroupedLayout, shares: Sequence[int]) -> list[Tensor]:
    """Stored rows of each rank, ascending."""
    free, found = list(shares), [torch.empty(0, dtype=torch.int64)] * len(shares)
    first = 0
    for size in _group_sizes(layout).tolist():
        last = first + size
        while first < last:
            to = max(range(len(free)), key=lambda index: free[index] / shares[index])
            count = min(free[to], last - first)
            found[to] = torch.cat([found[to], torch.arange(first, first + count)])
            free[to] -= count
            first += count
    return found


def _group_sizes(layout: GroupedLayout) -> Tensor:
    return torch.tensor([run.rows for run in layout.runs for _ in range(run.groups)])


def slice_rows(layout: WeightLayout, features: Tensor) -> RowSlice:
    """The slice of a matrix with these input features, int64, ascending."""
    count, none = len(features), torch.empty(0, dtype=torch.int64)
    if isinstance(layout, DenseLayout):
        return RowSlice(replace(layout, in_features=count), features, features, none)
    if isinstance(layout, TrellisLayout):
        first = (layout.first_in + first_of(features)) % HADAMARD
        cut_trellis = replace(layout, in_features=count, first_in=first)
        return RowSlice(cut_trellis, features, features, none)
    local = torch.full((layout.in_features,), -1)  # local feature of each feature
    local[features] = torch.arange(count)
    by_row = local if layout.features is None else local[layout.features.long()]
    rows = (by_row >= 0).nonzero().view(-1)
    sizes = _group_sizes(layout)
    group_of_row = torch.arange(len(sizes)).repeat_interleave(sizes)[rows]
    groups, kept = np.unique(group_of_row.numpy(), return_counts=True)
    if layout.features is not None:
        in_order = _by_size(layout, groups, kept)
        groups, kept = groups[in_order], kept[in_order]
        place = torch.empty(len(sizes), dtype=torch.int64)
        place[torch.from_numpy(groups)] = torch.arange(len(groups))
        rows = rows[place[group_of_row].argsort(stable=True)]
    order = by_row[rows].int()
    widths = [run.bits for run in layout.runs for _ in range(run.groups)]
    alike = groupby(zip((widths[group] for group in groups.tolist()), kept.tolist(), strict=True))
    runs = tuple(GroupRun(width, len(list(same)), size) for (width, size), same in alike)
    is_identity = torch.equal(order, torch.arange(count, dtype=torch.int32))
    found = None if is_identity else order
    cut = replace(layout, in_features=count, runs=runs, features=found, factor_rows=0)
    return RowSlice(cut, features, rows, torch.from_numpy(groups))


def _by_size(
    layout: GroupedLayout, groups: NDArray[np.int64], kept: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Indices of the groups of a slice that place groups of one width with equally many rows next
    to each other, the largest first. Kernels read such groups as one run.

    With act-order the features of a rank's heads are spread over all groups, so that each is cut to
    another number of rows.
    """
    run_of_group = np.repeat(np.arange(len(layout.runs)), [run.groups for run in layout.runs])
    return np.lexsort((groups, -kept, run_of_group[groups]))


class SlicedMatrix:
    """Columns and rows of another matrix; `RuntimeMatrix` of a rank.

    `columns`: int64, ascending; None: all. `features`: those of a row slice, int64, ascending;
    None: all. `has_bias`: keep the bias of the matrix, which only one of the ranks may add.
    """

    def __init__(
        self,
        matrix: RuntimeMatrix,
        *,
        columns: Tensor | None = None,
        features: Tensor | None = None,
        has_bias: bool = True,
    ) -> None:
        self._matrix = matrix
        self._columns = columns
        self._rows = None if features is None else slice_rows(matrix.layout, features)
        self._words = None if self._rows is None else word_rows(matrix.layout, self._rows.rows)
        if self._words is not None and not _has_words(matrix):
            self._words = None
        layout = matrix.layout if self._rows is None else self._rows.layout
        if columns is not None:
            layout = replace(layout, out_features=len(columns))
            if isinstance(layout, TrellisLayout):
                first = (layout.first_out + first_of(columns)) % HADAMARD
                layout = replace(layout, first_out=first)
        self.layout: WeightLayout = replace(layout, has_bias=layout.has_bias and has_bias)

    def columns(self, first: int, last: int, move: Move = stay) -> WeightColumns:
        if isinstance(self.layout, TrellisLayout):
            return self._trellis(self.layout, move)
        low, high, picked = self._span(first, last)
        if self._words is not None:  # only its own words are read and moved
            found = self._pick_words(self._matrix.columns(low, high), self._words, move)
        else:
            found = self._matrix.columns(low, high, move)
        if not self.layout.has_bias:
            found = replace(found, bias=None)
        if picked is not None:
            found = pick_columns(found, picked)
        if self._rows is None or self._words is not None:
            return found
        return pick_rows(found, self._matrix.layout, self._rows)

    def dense(self, first: int, last: int) -> Tensor:
        low, high, picked = self._span(first, last)
        found = self._matrix.dense(low, high)
        if picked is not None:
            found = found[picked]
        return found if self._rows is None else found[:, self._rows.features].contiguous()

    def _pick_words(self, columns: WeightColumns, words: Tensor, move: Move) -> WeightColumns:
        """The rows of the slice of these columns, which stay packed."""
        assert isinstance(columns, GroupedColumns), "`_has_words` has looked at them"
        assert self._rows is not None, "a slice of rows"
        scales, offsets, groups = columns.scales, columns.offsets, self._rows.groups
        return replace(
            columns,
            codes=move(columns.codes[words]),
            scales=None if scales is None else scales[groups],
            offsets=None if offsets is None else offsets[groups],
        )

    def _trellis(self, layout: TrellisLayout, move: Move) -> TrellisColumns:
        """All columns of the slice. Only its own blocks are moved."""
        whole = self._matrix.layout
        found = self._matrix.columns(0, whole.out_features)
        assert isinstance(whole, TrellisLayout), "a slice is of the kind of its matrix"
        assert isinstance(found, TrellisColumns), "columns are of the kind of their layout"
        bias = found.bias if layout.has_bias else None
        if bias is not None and self._columns is not None:
            bias = bias[self._columns]
        features = None if self._rows is None else self._rows.features
        rows = _blocks(whole.first_in, features, layout.stored_in)
        columns = _blocks(whole.first_out, self._columns, layout.stored_out)
        tiles = (slice(part.start // TILE, part.stop // TILE) for part in (rows, columns))
        return TrellisColumns(
            move(found.words[tuple(tiles)]),
            move(found.in_scales[rows]),
            move(found.out_scales[columns]),
            bias,
        )

    def _span(self, first: int, last: int) -> tuple[int, int, Tensor | None]:
        """Columns of the matrix with the slice's columns first .. last - 1, from a step on at which
        every codec can be read, and the indices of these columns in them; None: all."""
        if self._columns is None:
            return first, last, None
        wanted = self._columns[first:last]
        low = int(wanted[0]) // FILL_STEP * FILL_STEP
        high = int(wanted[-1]) + 1
        return low, high, None if high - low == last - first else wanted - low


def _has_words(matrix: RuntimeMatrix) -> bool:
    """Whether the codes are packed into words in the order of the stored rows."""
    if not isinstance(matrix.layout, GroupedLayout) or matrix.layout.factor_rows:
        return False
    columns = matrix.columns(0, min(FILL_STEP, matrix.layout.out_features))
    assert isinstance(columns, GroupedColumns), "codes have groups"
    return columns.packing == "words" and columns.source_rows is None


def first_of(indices: Tensor) -> int:
    """The first of consecutive indices, int64, as a slice of a trellis needs them.
    UnsupportedModelError for others: several parts of one matrix."""
    first = int(indices[0])
    if not torch.equal(indices, torch.arange(first, first + len(indices))):
        raise UnsupportedModelError(
            "tensor parallelism cannot divide a trellis whose columns are of several kinds",
            expected="a matrix of its own for each projection",
            got="one of a short convolution or of Mamba-2",
            next_step="Give whole layers to each GPU with --split instead.",
        )
    return first


def _blocks(first: int, own: Tensor | None, count: int) -> slice:
    """The `count` stored rows or columns of a slice, in whole blocks. `first` is the stored one of
    the matrix's first, and `own` are those of the matrix; None: all."""
    start = (first + (0 if own is None else first_of(own))) // HADAMARD * HADAMARD
    return slice(start, start + count)


def pick_columns(columns: WeightColumns, picked: Tensor) -> WeightColumns:
    """Some of these columns, by their indices, int64."""
    bias = None if columns.bias is None else columns.bias[picked]
    if isinstance(columns, DenseColumns):
        return DenseColumns(columns.weight[_on(picked, columns.weight)], bias)
    assert isinstance(columns, GroupedColumns), "a trellis is sliced in blocks"
    index = _on(picked, columns.codes)
    is_by_row = columns.packing in ("words", "bytes")
    return replace(
        columns,
        codes=columns.codes.index_select(1 if is_by_row else 0, index),
        scales=None if columns.scales is None else columns.scales[:, _on(picked, columns.scales)],
        offsets=None
        if columns.offsets is None
        else columns.offsets[:, _on(picked, columns.offsets)],
        bias=bias,
        parts=None if columns.parts is None else _picked_parts(columns.parts, picked),
    )


def _picked_parts(parts: ScaleParts, picked: Tensor) -> ScaleParts:
    index, minimums = _on(picked, parts.factors), parts.minimum_factors
    return ScaleParts(
        parts.factors[:, index],
        parts.multipliers[:, index],
        None if minimums is None else minimums[:, index],
    )


def pick_rows(columns: WeightColumns, layout: WeightLayout, cut: RowSlice) -> WeightColumns:
    """The rows of a slice of these columns. `layout` is that of the whole matrix."""
    if isinstance(columns, DenseColumns):
        weight = columns.weight[:, _on(cut.features, columns.weight)]
        return DenseColumns(weight.contiguous(), columns.bias)
    assert isinstance(layout, GroupedLayout), "codes have groups"
    assert isinstance(columns, GroupedColumns), "columns are of the kind of their layout"
    found = as_bytes(columns, layout)
    scales, offsets = found.scales, found.offsets
    assert scales is not None, "columns of bytes have scales"
    return GroupedColumns(
        "bytes",
        found.codes[_on(cut.rows, found.codes)],
        scales=scales[_on(cut.groups, scales)],
        offsets=None if offsets is None else offsets[_on(cut.groups, offsets)],
        bias=columns.bias,
    )


def as_bytes(columns: GroupedColumns, layout: GroupedLayout) -> GroupedColumns:
    """The same columns with one code per byte, in the order of stored rows, and with scales."""
    if columns.packing == "bytes":
        found = columns
    elif columns.packing == "words":
        found = replace(columns, packing="bytes", codes=_codes_of_words(columns.codes, layout))
    else:
        found = _codes_of_blocks(columns, layout)
    if found.source_rows is None:
        return found
    codes = found.codes[_on(found.source_rows.long(), found.codes)]
    return replace(found, codes=codes, source_rows=None)


def _codes_of_words(words: Tensor, layout: GroupedLayout) -> Tensor:
    """Codes, uint8 [stored rows, columns]. Every run begins with a whole word."""
    parts, first_bit = [], 0
    for run in layout.runs:
        rows = run.groups * run.rows
        assert first_bit % bits.WORD_BITS == 0, "formats with several widths have whole words"
        first = first_bit // bits.WORD_BITS
        first_bit += rows * run.bits
        held = words[first : -(-first_bit // bits.WORD_BITS)]
        missing = -len(held) % bits.words_per_block(run.bits)
        padded = torch.cat([held, held.new_zeros(missing, held.shape[1])]) if missing else held
        parts.append(bits.unpack(padded, run.bits)[:rows])
    return torch.cat(parts)


def _codes_of_blocks(columns: GroupedColumns, layout: GroupedLayout) -> GroupedColumns:
    """Unpacks GGML blocks of 32 rows: scale, minimum in some types, fifth bits, codes. Low halves
    of the bytes hold rows 0 to 15, high halves rows 16 to 31."""
    assert columns.packing in _BLOCKS, f"a slice of columns packed as {columns.packing}"
    width, groups = layout.runs[0].bits, layout.num_groups
    blocks = columns.codes.reshape(len(columns.codes), groups, -1)  # [columns, groups, bytes]
    numbers = 2 if layout.formula == "minimums" else 1
    factors = blocks[..., : 2 * numbers].contiguous().view(torch.float16)
    rest = blocks[..., 2 * numbers :]
    if width == 8:
        codes = rest ^ 0x80
    else:
        halves = rest[..., -_BLOCK_ROWS // 2 :]
        codes = torch.cat([halves & 15, halves >> 4], dim=-1)
        if width == 5:
            row = torch.arange(_BLOCK_ROWS, device=rest.device)
            codes = codes | (rest[..., row // 8] >> (row % 8).to(torch.uint8) & 1) << 4
    return GroupedColumns(
        "bytes",
        codes.flatten(1).T.contiguous(),
        scales=factors[..., 0].T.contiguous(),
        offsets=factors[..., 1].T.contiguous() if numbers > 1 else None,
        bias=columns.bias,
    )


def _on(index: Tensor, tensor: Tensor) -> Tensor:
    """The index on the tensor's device, without a wait for what the device has to do."""
    return index.to(tensor.device, non_blocking=True)
