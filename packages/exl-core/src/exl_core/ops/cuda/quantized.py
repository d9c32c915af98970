"""Quantized matrices on the GPU: where everything lies in their tiles, and filling them.

The layout is that of `exl/cuda.h`: strips of 32 columns, all alike; in a strip, units of up to four
blocks of 32 rows of one group. What it depends on is worked out here, once, from the `QuantLayout`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from threading import Lock
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl_core.ops.checks import OpInputError
from exl_core.ops.cuda.library import TYPES, Gpu
from exl_core.ops.cuda.upload import upload
from exl_core.ops.quantized import FILL_STEP, GroupRun, Offset, QuantColumns, QuantLayout
from exl_kernels import cuda

STRIP = 32  # columns
BLOCK_ROWS = 32
UNIT_BLOCKS = 4
MAX_BLOCKS = 1 << 16  # a unit names its first block in 16 bits

_UNIT = np.dtype(
    [
        ("offset", "<u4"),
        ("first_block", "<u2"),
        ("bits", "u1"),
        ("blocks", "u1"),
        ("group", "<u4"),
    ]
)
assert _UNIT.itemsize == cuda.UNIT_BYTES
_RUN = np.dtype(
    [
        ("first_unit", "<u4"),
        ("offset", "<u4"),
        ("first_block", "<u2"),
        ("group_units", "<u2"),
        ("bits", "u1"),
        ("last_blocks", "u1"),
        ("reserved", "<u2"),
    ]
)
assert _RUN.itemsize == cuda.RUN_BYTES


class TilePlan(NamedTuple):
    """What a matrix's tiles look like, apart from their columns."""

    units: NDArray[np.void]
    runs: NDArray[np.void]
    stored_rows: NDArray[np.int32]  # of each padded row, -1: padding
    bit_offsets: NDArray[np.int64]  # of each unit's first row, in a column's stream of bits
    strip_bytes: int
    rows_digest: bytes  # of stored_rows, which plans of other widths may have as well

    @property
    def num_blocks(self) -> int:
        return len(self.stored_rows) // BLOCK_ROWS


@lru_cache(maxsize=64)
def plan_tiles(runs: tuple[GroupRun, ...], offset: Offset, scale_bytes: int) -> TilePlan:
    """The same plan for matrices whose rows are laid out alike: most of a model's are."""
    head = STRIP * (scale_bytes + {"middle": 0, "zeros": 1, "minimums": scale_bytes}[offset])
    units, rows, bits = [], [], []
    described = np.zeros(len(runs), _RUN)
    unit = block = group = row = bit = 0
    place = cuda.STRIP_HEAD
    for i, run in enumerate(runs):
        blocks = -(-run.rows // BLOCK_ROWS)
        in_group = np.arange(0, blocks, UNIT_BLOCKS)
        part = np.zeros((run.groups, len(in_group)), _UNIT)
        part["bits"] = run.bits
        part["blocks"] = np.minimum(blocks - in_group, UNIT_BLOCKS)
        part["group"] = group + np.arange(run.groups)[:, None]
        part["first_block"] = block + np.arange(run.groups)[:, None] * blocks + in_group
        sizes = (
            head + part["blocks"].astype(np.int64) * (STRIP * BLOCK_ROWS * run.bits // 8)
        ).ravel()
        part["offset"] = (place + np.cumsum(sizes) - sizes).reshape(part.shape)
        described["first_unit"][i] = unit
        described["offset"][i], described["first_block"][i] = place, block
        described["bits"][i], described["group_units"][i] = run.bits, len(in_group)
        described["last_blocks"][i] = blocks - in_group[-1]
        units.append(part.ravel())
        unit += part.size

        first_rows = np.arange(run.groups)[:, None] * run.rows
        of_block = np.arange(blocks * BLOCK_ROWS)
        stored = np.where(of_block < run.rows, row + first_rows + of_block, -1)
        rows.append(stored.ravel().astype(np.int32))
        bits.append((bit + run.bits * (first_rows + in_group * BLOCK_ROWS)).ravel())

        block += run.groups * blocks
        group += run.groups
        row += run.groups * run.rows
        bit += run.groups * run.rows * run.bits
        place += int(sizes.sum())
    if block > MAX_BLOCKS:
        raise OpInputError(f"new_quantized: {block} blocks of rows (expected at most {MAX_BLOCKS})")
    stored_rows = np.concatenate(rows)
    return TilePlan(
        np.concatenate(units),
        described,
        stored_rows,
        np.concatenate(bits).astype(np.int64),
        place,
        _digest(stored_rows),
    )


class CudaQuantLinear:
    """A PackedLinear on the GPU; `matrix` is what kernels take, and points into the tensors here.

    Matrices whose rows are in the same order share one `order`.
    """

    def __init__(self, layout: QuantLayout, gpu: Gpu) -> None:
        plan_key = (layout.runs, layout.offset, layout.scale_dtype.itemsize)
        plan = plan_tiles(*plan_key)
        strips = -(-layout.out_features // STRIP)
        device = gpu.device
        self.layout = layout
        self._gpu = gpu
        self.num_blocks = plan.num_blocks
        features = None if layout.features is None else layout.features.numpy()
        order_key = plan.rows_digest, None if features is None else _digest(features)
        self.order = _shared(device, ("order", order_key), lambda: _order(plan, features))
        self.places: Tensor | None = None
        """Of each feature its row in `order`, where no row is padding."""
        if plan.num_blocks * BLOCK_ROWS == layout.in_features:
            self.places = _shared(
                device, ("places", order_key), lambda: _inverse(_order(plan, features))
            )
        self.bias = torch.zeros(layout.out_features, device=device) if layout.has_bias else None
        self._units = _shared(device, ("units", plan_key), lambda: plan.units.view(np.uint8))
        self._runs = plan.runs
        self._device_runs = _shared(device, ("runs", plan_key), lambda: plan.runs.view(np.uint8))
        self._stored_rows = _shared(device, ("rows", plan.rows_digest), lambda: plan.stored_rows)
        self._bit_offsets = _shared(device, ("bits", plan_key), lambda: plan.bit_offsets)
        self._tiles = gpu.empty(strips * plan.strip_bytes, dtype=torch.uint8)
        self.matrix = cuda.QuantMatrix(
            tiles=self._tiles.data_ptr(),
            units=self._units.data_ptr(),
            runs=self._runs.ctypes.data,
            device_runs=self._device_runs.data_ptr(),
            order=self.order.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            strip_bytes=plan.strip_bytes,
            n=layout.out_features,
            k=layout.in_features,
            num_units=len(plan.units),
            num_blocks=plan.num_blocks,
            num_runs=len(plan.runs),
            scale_dtype=TYPES[layout.scale_dtype],
            offset_kind=cuda.OFFSETS[layout.offset],
        )

    @property
    def out_features(self) -> int:
        return self.layout.out_features

    @property
    def in_features(self) -> int:
        return self.layout.in_features

    @property
    def size_bytes(self) -> int:
        """Without what it may share with others."""
        return self._tiles.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def fill(self, first_column: int, columns: QuantColumns) -> None:
        """Repacks columns first_column ..; their parts may lie in any memory."""
        is_words = columns.packing in ("words", "bytes")
        count = columns.codes.shape[1 if is_words else 0]
        last = first_column + count
        is_whole = first_column % FILL_STEP == 0 and count > 0
        is_whole = is_whole and (count % FILL_STEP == 0 or last == self.out_features)
        if not is_whole or not 0 <= first_column < last <= self.out_features:
            raise OpInputError(
                f"fill_quantized: first_column (expected whole strips of {FILL_STEP} columns"
                f" within [0, {self.out_features}), got {count} at {first_column})"
            )
        if columns.codes.stride(1) != 1:
            raise OpInputError("fill_quantized: codes (expected rows without gaps)")
        device = self._gpu.device
        codes = upload(columns.codes, device)
        beside = [
            None if part is None else upload(part, device)
            for part in (columns.source_rows, columns.scales, columns.offsets)
        ]
        source_rows, scales, offsets = (
            None if part is None else part.data_ptr() for part in beside
        )
        operands = cuda.QuantColumns(
            packing=cuda.PACKINGS[columns.packing],
            first_column=first_column,
            columns=count,
            scale_dtype=TYPES[self.layout.scale_dtype],
            codes=codes.data_ptr(),
            row_stride=codes.stride(0),
            stored_rows=self._stored_rows.data_ptr(),
            source_rows=source_rows,
            bit_offsets=self._bit_offsets.data_ptr(),
            scales=scales,
            offsets=offsets,
        )
        self._gpu.call("quant_pack", self.matrix, operands)
        if self.bias is not None and columns.bias is not None:
            self.bias[first_column:last].copy_(columns.bias)

    def unpack(self, first: int, columns: int, out: Tensor) -> None:
        """out float16 [in_features, columns] = the weights, features in their own order.

        `first` is a multiple of 32; rows of `out` may lie apart.
        """
        self._gpu.call("quant_unpack", self.matrix, first, columns, out.data_ptr(), out.stride(0))


def _order(plan: TilePlan, features: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """Feature of each padded row, -1: padding."""
    rows = plan.stored_rows
    if features is None:
        return rows
    is_padded = len(rows) > len(features)
    return np.where(rows < 0, np.int32(-1), features[rows]) if is_padded else features


def _inverse(order: NDArray[np.int32]) -> NDArray[np.int32]:
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places


def _digest(values: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(values.tobytes()).digest()


_tables: WeakValueDictionary[tuple[torch.device, Hashable], Tensor] = WeakValueDictionary()
_tables_lock = Lock()


def _shared(device: torch.device, key: Hashable, make: Callable[[], NDArray[np.generic]]) -> Tensor:
    """The table of that key on the device: one tensor for all who have it, while any of them lives.

    The copy is not waited for: while the lock is held, all that fill matrices would wait with it.
    """
    with _tables_lock:
        held = _tables.get((device, key))
        if held is None:
            held = upload(torch.from_numpy(make()), device)
            _tables[device, key] = held
        return held
