"""Quantized matrices on the GPU: the plan of their packed layout, and filling them.

`exl/cuda/linear.h` defines the layout: column panels of 32 columns, all with the same layout, and
in a panel k-tiles of up to four blocks of 32 rows of one group. This module computes the tables of
k-tiles and runs from the `GroupedLayout`, once per layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from threading import Lock
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu, Slab
from exl_core.ops.backends.cuda.upload import upload
from exl_core.ops.checks import OpInputError
from exl_core.ops.linear import LayoutSizes
from exl_core.ops.weights import (
    EXPONENT_BIAS,
    FILL_STEP,
    Formula,
    GroupedColumns,
    GroupedLayout,
    GroupRun,
)
from exl_kernels import cuda

PANEL_COLUMNS = 32
BLOCK_ROWS = 32
K_TILE_BLOCKS = 4
MAX_BLOCKS = 1 << 16  # a k-tile stores the number of its first block in 16 bits

_K_TILE = np.dtype(
    [
        ("offset", "<u4"),
        ("first_block", "<u2"),
        ("bits", "u1"),
        ("blocks", "u1"),
        ("group", "<u4"),
    ]
)
assert _K_TILE.itemsize == cuda.K_TILE_BYTES
_RUN = np.dtype(
    [
        ("first_k_tile", "<u4"),
        ("offset", "<u4"),
        ("first_block", "<u2"),
        ("group_k_tiles", "<u2"),
        ("bits", "u1"),
        ("last_blocks", "u1"),
        ("reserved", "<u2"),
    ]
)
assert _RUN.itemsize == cuda.RUN_BYTES


_FORMULAS: dict[Formula, tuple[str, str]] = {
    "middle": ("middle", "integers"),
    "zeros": ("zeros", "integers"),
    "minimums": ("minimums", "integers"),
    "e4m3": ("middle", "e4m3"),
    "iq4_nl": ("middle", "iq4_nl"),
    "mxfp4": ("middle", "mxfp4"),
}
"""Names of `offset_kind` and `values` of ExlQuantMatrix."""


class TilePlan(NamedTuple):
    """Packed layout of one column panel; the same for all panels of a matrix."""

    k_tiles: NDArray[np.void]  # ExlQuantKTile
    runs: NDArray[np.void]  # ExlQuantRun
    stored_rows: NDArray[np.int32]  # stored row of each padded row, -1: padding
    bit_offsets: NDArray[np.int64]  # bit of each k-tile's first row in a column's bit stream
    panel_bytes: int
    rows_digest: bytes  # of stored_rows; plans with other bit widths may have the same rows

    @property
    def num_blocks(self) -> int:
        return len(self.stored_rows) // BLOCK_ROWS


_SMALL_OFFSETS: dict[Formula, str] = {"middle": "small_middle", "minimums": "small_minimums"}
"""The same `offset_kind` for small groups."""

SMALL_GROUPS = 8  # in a k-tile of 128 rows
_SMALL_ORDER = np.arange(BLOCK_ROWS).reshape(2, 4, 4).swapaxes(0, 1).ravel()
"""Stored row of each row of a block with two small groups: k16 step s multiplies group s."""


@lru_cache(maxsize=64)
def plan_small_groups(bits: int, rows: int, factor_bytes: int) -> TilePlan:
    """Plan of a matrix of `rows` rows in groups of 16, whose factors take `factor_bytes` per
    column."""
    k_tile_rows = K_TILE_BLOCKS * BLOCK_ROWS
    runs = (GroupRun(bits, rows // k_tile_rows, k_tile_rows),)
    plan = plan_tiles(runs, factor_bytes, SMALL_GROUPS)
    stored = (plan.stored_rows.reshape(-1, BLOCK_ROWS)[:, _SMALL_ORDER]).ravel()
    return plan._replace(stored_rows=stored, rows_digest=_digest(stored))


@lru_cache(maxsize=1024)  # experts may have bit widths of their own
def plan_tiles(runs: tuple[GroupRun, ...], scale_bytes: int, offset_bytes: int) -> TilePlan:
    """Computes a plan. Matrices with the same runs share it, as most of a model's do.

    Groups that are padded to the same number of blocks become one run of k-tiles. Kernels take few
    runs as parameters, and read a longer table from memory.

    `scale_bytes` and `offset_bytes` are the sizes of one scale and of one offset.
    """
    header_bytes = PANEL_COLUMNS * (scale_bytes + offset_bytes)
    k_tiles, rows, bits = [], [], []
    found: list[tuple[int, ...]] = []  # entries of the table of runs
    k_tile = block = group = row = bit = 0
    panel_bytes = cuda.PANEL_HEAD
    for run in runs:
        blocks = -(-run.rows // BLOCK_ROWS)
        in_group = np.arange(0, blocks, K_TILE_BLOCKS)
        part = np.zeros((run.groups, len(in_group)), _K_TILE)
        part["bits"] = run.bits
        part["blocks"] = np.minimum(blocks - in_group, K_TILE_BLOCKS)
        part["group"] = group + np.arange(run.groups)[:, None]
        part["first_block"] = block + np.arange(run.groups)[:, None] * blocks + in_group
        sizes = (
            header_bytes
            + part["blocks"].astype(np.int64) * (PANEL_COLUMNS * BLOCK_ROWS * run.bits // 8)
        ).ravel()
        part["offset"] = (panel_bytes + np.cumsum(sizes) - sizes).reshape(part.shape)
        shape = len(in_group), run.bits, blocks - in_group[-1], 0
        if not found or found[-1][3:] != shape:
            found.append((k_tile, panel_bytes, block, *shape))
        k_tiles.append(part.ravel())
        k_tile += part.size

        first_rows = np.arange(run.groups)[:, None] * run.rows
        of_block = np.arange(blocks * BLOCK_ROWS)
        stored = np.where(of_block < run.rows, row + first_rows + of_block, -1)
        rows.append(stored.ravel().astype(np.int32))
        bits.append((bit + run.bits * (first_rows + in_group * BLOCK_ROWS)).ravel())

        block += run.groups * blocks
        group += run.groups
        row += run.groups * run.rows
        bit += run.groups * run.rows * run.bits
        panel_bytes += int(sizes.sum())
    if block > MAX_BLOCKS:
        raise OpInputError(f"new_linear: {block} blocks of rows (expected at most {MAX_BLOCKS})")
    stored_rows = np.concatenate(rows)
    return TilePlan(
        np.concatenate(k_tiles),
        np.array(found, _RUN),
        stored_rows,
        np.concatenate(bits).astype(np.int64),
        panel_bytes,
        _digest(stored_rows),
    )


def _plan_of(layout: GroupedLayout, scale_bytes: int) -> tuple[TilePlan, tuple[Hashable, ...]]:
    """The plan of a matrix, and a key that equal plans share."""
    if layout.factor_rows:
        factor_bytes = 4 if layout.formula == "minimums" else 2
        key = (layout.runs[0].bits, layout.in_features, factor_bytes)
        return plan_small_groups(*key), ("small", *key)
    offset_bytes = 0 if layout.offset_dtype is None else layout.offset_dtype.itemsize
    tiles_key = (layout.runs, scale_bytes, offset_bytes)
    return plan_tiles(*tiles_key), tiles_key


def _scale_dtype(layout: GroupedLayout) -> torch.dtype:
    """Type of the scales as kernels read them: those of MXFP4 are floats."""
    if layout.factor_rows:
        return torch.float16
    return torch.float32 if layout.formula == "mxfp4" else layout.scale_dtype


def tiles_bytes(layout: GroupedLayout) -> int:
    """Size of the packed weights of a matrix."""
    plan, _ = _plan_of(layout, _scale_dtype(layout).itemsize)
    return -(-layout.out_features // PANEL_COLUMNS) * plan.panel_bytes


class CudaQuantLinear(LayoutSizes[GroupedLayout]):
    """A quantized matrix on the GPU (`PackedLinear`).

    `matrix` is the struct that kernels take. It points into tensors that this object owns. Matrices
    with the same order of rows share one `permutation` tensor.
    """

    def __init__(
        self, layout: GroupedLayout, gpu: Gpu, *, on_host: bool = False, memory: Slab | None = None
    ) -> None:
        self._scale_dtype = _scale_dtype(layout)
        offset_kind, values = _FORMULAS[layout.formula]
        if layout.factor_rows:
            offset_kind = _SMALL_OFFSETS[layout.formula]
        plan, plan_key = _plan_of(layout, self._scale_dtype.itemsize)
        device = gpu.device
        self.layout = layout
        self.plan_key = plan_key
        self._gpu = gpu
        self.num_blocks = plan.num_blocks
        features = None if layout.features is None else layout.features.numpy()
        permutation_key = plan.rows_digest, None if features is None else _digest(features)
        shared = partial(shared_table, device)
        self.permutation = shared(
            ("permutation", permutation_key), lambda: _permutation(plan, features)
        )
        self.inverse_permutation: Tensor | None = None
        """Row of each feature: the inverse of `permutation`. None if some rows are padding."""
        if plan.num_blocks * BLOCK_ROWS == layout.in_features:
            self.inverse_permutation = shared(
                ("inverse_permutation", permutation_key),
                lambda: _inverted(_permutation(plan, features)),
            )
        self.bias = torch.zeros(layout.out_features, device=device) if layout.has_bias else None
        self._k_tiles = shared(("k_tiles", plan_key), lambda: plan.k_tiles.view(np.uint8))
        self._runs = plan.runs
        self._device_runs = shared(("runs", plan_key), lambda: plan.runs.view(np.uint8))
        self._stored_rows = shared(("rows", plan.rows_digest), lambda: plan.stored_rows)
        self._bit_offsets = shared(("bits", plan_key), lambda: plan.bit_offsets)
        size = tiles_bytes(layout)
        # Kernels read page-locked memory of the host over the bus, at the same address.
        self._tiles = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
            if on_host
            else (gpu if memory is None else memory).empty(size, dtype=torch.uint8)
        )
        self.matrix = cuda.QuantMatrix(
            tiles=self._tiles.data_ptr(),
            k_tiles=self._k_tiles.data_ptr(),
            runs=self._runs.ctypes.data,
            device_runs=self._device_runs.data_ptr(),
            permutation=self.permutation.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            panel_bytes=plan.panel_bytes,
            n=layout.out_features,
            k=layout.in_features,
            num_k_tiles=len(plan.k_tiles),
            num_blocks=plan.num_blocks,
            num_runs=len(plan.runs),
            scale_dtype=TYPES[self._scale_dtype],
            offset_kind=cuda.OFFSETS[offset_kind],
            values=cuda.VALUES[values],
        )

    @property
    def has_integers(self) -> bool:
        return self.layout.has_integers

    @property
    def size_bytes(self) -> int:
        """Size without the tables that other matrices may share."""
        return self._tiles.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def part(self, like: CudaQuantLinear, offset: int, *, first_column: int = 0) -> CudaQuantLinear:
        """Columns or rows of this matrix as a matrix with the sizes, layout and order of `like`.

        The memory is shared; `size_bytes` is that of the whole.

        offset         bytes from the start of a panel of this matrix to one of the part
        first_column   of the part, for the bias
        """
        found, columns = copy(self), like.out_features
        found.layout, found.plan_key, found.num_blocks = like.layout, like.plan_key, like.num_blocks
        found.permutation = like.permutation
        found.inverse_permutation = like.inverse_permutation
        found.bias = None if self.bias is None else self.bias[first_column : first_column + columns]
        own, matrix = self.matrix, cuda.QuantMatrix.from_buffer_copy(like.matrix)
        matrix.tiles, matrix.panel_bytes = own.tiles + offset, own.panel_bytes
        matrix.bias = None if found.bias is None else found.bias.data_ptr()
        matrix.scale_dtype, matrix.values = own.scale_dtype, own.values
        matrix.offset_kind = own.offset_kind
        found.matrix = matrix
        return found

    @classmethod
    def merged(cls, parts: Sequence[CudaQuantLinear]) -> CudaQuantLinear | None:
        """One matrix with the outputs of all parts, whose memory it copies; None if their layouts
        differ or a part ends within a panel."""
        first = parts[0]
        keys = {(one.plan_key, one.layout.formula, one.permutation.data_ptr()) for one in parts}
        is_whole = all(one.out_features % PANEL_COLUMNS == 0 for one in parts)
        if len(keys) > 1 or not is_whole or any(one.bias is not None for one in parts):
            return None
        torch.cuda.synchronize(first._gpu.device)  # streams of other threads fill the parts
        found, columns = copy(first), sum(one.out_features for one in parts)
        found.layout = replace(first.layout, out_features=columns)
        found._tiles = torch.cat([one._tiles for one in parts])
        found.matrix = cuda.QuantMatrix.from_buffer_copy(first.matrix)
        found.matrix.tiles, found.matrix.n = found._tiles.data_ptr(), columns
        return found

    @staticmethod
    def move_together(matrices: Sequence[CudaQuantLinear]) -> None:
        """Moves codes of equal sizes to one allocation, in this order, so that kernels compute
        their addresses. Without memory for a copy they stay where they are."""
        first, device = matrices[0], matrices[0]._gpu.device
        if len({one._tiles.nbytes for one in matrices}) > 1 or not first._tiles.is_cuda:
            return
        torch.cuda.synchronize(device)  # streams of other threads fill them
        try:
            memory = torch.cat([one._tiles for one in matrices]).view(len(matrices), -1)
        except torch.cuda.OutOfMemoryError:
            return
        # Those streams may get the freed memory at once.
        torch.cuda.current_stream(device).synchronize()
        for one, tiles in zip(matrices, memory, strict=True):
            one._tiles, one.matrix.tiles = tiles, tiles.data_ptr()

    def fill(self, first_column: int, columns: GroupedColumns) -> None:
        """Repacks columns from first_column on. The operands may be on the CPU or the GPU."""
        is_words = columns.packing in ("words", "bytes")
        count = columns.codes.shape[1 if is_words else 0]
        last = first_column + count
        is_whole = first_column % FILL_STEP == 0 and count > 0
        is_whole = is_whole and (count % FILL_STEP == 0 or last == self.out_features)
        if not is_whole or not 0 <= first_column < last <= self.out_features:
            raise OpInputError(
                f"fill_linear: first_column (expected whole panels of {FILL_STEP} columns"
                f" within [0, {self.out_features}), got {count} at {first_column})"
            )
        if columns.codes.stride(1) != 1:
            raise OpInputError("fill_linear: codes (expected rows without gaps)")
        device = self._gpu.device
        codes = upload(columns.codes, device)
        sources: list[Tensor | None]
        if self.layout.factor_rows:
            parts = columns.parts
            if parts is None:
                raise OpInputError("fill_linear: parts (expected scales as products)")
            sources = [parts.factors, parts.minimum_factors, parts.multipliers]
        else:
            sources = [self._stored_scales(columns), columns.offsets, None]
        uploaded = [
            None if part is None else upload(part, device)
            for part in (columns.source_rows, *sources)
        ]
        source_rows, scales, offsets, multipliers = (
            None if part is None else part.data_ptr() for part in uploaded
        )
        operands = cuda.QuantColumns(
            packing=cuda.PACKINGS[columns.packing],
            first_column=first_column,
            columns=count,
            scale_dtype=TYPES[self._scale_dtype],
            codes=codes.data_ptr(),
            row_stride=codes.stride(0),
            stored_rows=self._stored_rows.data_ptr(),
            source_rows=source_rows,
            bit_offsets=self._bit_offsets.data_ptr(),
            scales=scales,
            offsets=offsets,
            multipliers=multipliers,
        )
        self._gpu.call("quant_pack", self.matrix, operands)
        if self.bias is not None and columns.bias is not None:
            self.bias[first_column:last].copy_(columns.bias)

    def _stored_scales(self, columns: GroupedColumns) -> Tensor | None:
        """Scales as kernels read them. Those of MXFP4 are halved, because its table is doubled."""
        scales = columns.scales
        if scales is None or self.layout.formula != "mxfp4":
            return scales
        exponents = scales.to(torch.float64) - (EXPONENT_BIAS + 1)
        return torch.exp2(exponents).to(torch.float32)

    def unpack(self, first: int, columns: int, out: Tensor) -> None:
        """Dequantizes columns: out float16 [in_features, columns], in the order of the features.

        `first` is a multiple of 32. `out` may have any row stride.
        """
        self._gpu.call("quant_unpack", self.matrix, first, columns, out.data_ptr(), out.stride(0))


def _permutation(plan: TilePlan, features: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """Input feature of each padded row, -1 for padding."""
    rows = plan.stored_rows
    if features is None:
        return rows
    is_padded = len(rows) > len(features)
    return np.where(rows < 0, np.int32(-1), features[rows]) if is_padded else features[rows]


def _inverted(permutation: NDArray[np.int32]) -> NDArray[np.int32]:
    inverse_permutation = np.empty_like(permutation)
    inverse_permutation[permutation] = np.arange(len(permutation), dtype=np.int32)
    return inverse_permutation


def _digest(values: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(values.tobytes()).digest()


_shared_tables: WeakValueDictionary[tuple[torch.device, Hashable], Tensor] = WeakValueDictionary()
_shared_tables_lock = Lock()


def shared_table(
    device: torch.device, key: Hashable, make: Callable[[], NDArray[np.generic]]
) -> Tensor:
    """Table of that key on the device. All matrices that use it share one tensor.

    The host does not synchronize with the copy. It would do so under the lock, and thereby block
    all other threads that fill matrices.
    """
    with _shared_tables_lock:
        held = _shared_tables.get((device, key))
        if held is None:
            held = upload(torch.from_numpy(make()), device)
            _shared_tables[device, key] = held
        return held
