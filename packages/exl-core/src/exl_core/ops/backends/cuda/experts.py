"""Matrices of the experts of one layer, quantized or float16: a table that kernels index by expert.

`exl/cuda/moe.h` defines the table. The matrices stay where they are; the table points to them.
Experts may have layouts of their own. If all have the same order of rows, a row of inputs is
prepared once for all of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.matmul import CudaLinear
from exl_core.ops.backends.cuda.quantized import (
    BLOCK_ROWS,
    K_TILE_BLOCKS,
    PANEL_COLUMNS,
    SMALL_GROUPS,
    CudaQuantLinear,
    TilePlan,
    plan_small_groups,
    plan_tiles,
    shared_table,
)
from exl_core.ops.backends.cuda.upload import upload
from exl_kernels import cuda

_LOAD = np.dtype(
    [
        ("offset", "<u4"),
        ("first_block", "<u2"),
        ("bytes", "<u2"),
        ("bits", "u1"),
        ("k_tiles", "u1"),
        ("k_tile_blocks", "u1"),
        ("blocks", "u1"),
        ("reserved", "<u4"),
    ]
)
assert _LOAD.itemsize == cuda.LOAD_BYTES
_MATRIX = np.dtype(
    [
        ("tiles", "<u8"),
        ("loads", "<u8"),
        ("permutation", "<u8"),
        ("inverse_permutation", "<u8"),
        ("bias", "<u8"),
        ("panel_bytes", "<i8"),
        ("num_loads", "<i4"),
        ("kind", "<u4"),
        ("num_blocks", "<i4"),
        ("header_bytes", "<i4"),
    ]
)
assert _MATRIX.itemsize == cuda.EXPERT_MATRIX_BYTES

Source = Literal["codes", "small_groups", "dense"]
"""How the matrices of a layer's experts store their weights."""

Part = CudaLinear | CudaQuantLinear


class Places(NamedTuple):
    """`ExlExpertPlaces`."""

    tiles: int
    expert_bytes: int
    part_bytes: int
    panel_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CudaExperts:
    """PackedExperts that the kernels index by expert.

    Each expert has one matrix, or a gate and an up of equal sizes.
    """

    matrices: tuple[tuple[Part, ...], ...]
    parts: int  # matrices of each expert that the table has: one, or two halves of one
    columns: int  # outputs of each part
    source: Source
    table: Tensor  # ExlExpertMatrix [experts, parts]
    tables_of_loads: tuple[Tensor, ...]  # keeps them alive
    num_loads: int  # the largest number of any matrix
    load_bytes: int  # the largest number of any load
    num_blocks: int  # the largest number of any matrix
    has_common_order: bool  # all matrices have the same order of rows
    has_one_order: bool  # the parts of each expert have the same order of rows
    is_plain: bool  # that order is the order of the features, and no row is padding
    has_inverses: bool  # no row of any matrix is padding
    has_bias: bool  # of any matrix

    halves: CudaExperts | None = None  # gate and up, if these are the halves of one matrix
    shared: int = 0  # of these experts, the last ones, that are parts of a shared one
    only: int = 0  # what all loads of all matrices have in common (ExlExpertLinear.only)
    places: tuple[Places | None, Places | None] = (None, None)  # of the experts, and of shared ones

    @classmethod
    def of(cls, experts: Sequence[tuple[Part, ...]], gpu: Gpu, *, shared: int = 0) -> CudaExperts:
        whole = cls._with_parts(experts, gpu, divided_by=1, shared=shared)
        step = 1 if whole.source == "dense" else PANEL_COLUMNS
        if whole.parts > 1 or whole.columns % (2 * step) != 0:
            return whole
        halves = cls._with_parts(experts, gpu, divided_by=2, shared=shared)
        return replace(whole, halves=halves)

    @classmethod
    def _with_parts(
        cls, experts: Sequence[tuple[Part, ...]], gpu: Gpu, *, divided_by: int, shared: int
    ) -> CudaExperts:
        """The columns of each matrix are divided into as many parts."""
        each = [w for parts in experts for w in parts]
        columns = each[0].out_features // divided_by
        table = np.zeros((len(experts), divided_by * len(experts[0])), _MATRIX)
        held: dict[int, Tensor] = {}
        num_loads = load_bytes = 0
        for expert, parts in enumerate(experts):
            for i in range(table.shape[1]):
                w, first = parts[i // divided_by], i % divided_by * columns
                if isinstance(w, CudaLinear):
                    table[expert, i] = _dense_entry(w, first)
                    num_loads, load_bytes = w.in_features // BLOCK_ROWS, 128
                    continue
                loads = loads_of(w.plan_key)
                on_device = shared_table(
                    gpu.device, ("loads", w.plan_key), partial(loads.view, np.uint8)
                )
                held[on_device.data_ptr()] = on_device
                table[expert, i] = _entry(w, first, on_device, len(loads))
                num_loads = max(num_loads, len(loads))
                load_bytes = max(load_bytes, int(loads["bytes"].max()))
        assert not (table["tiles"] % cuda.LOAD_BYTES).any(), "weights not aligned to 16 bytes"
        orders = [[_order(w) for w in parts] for parts in experts]
        return cls(
            matrices=tuple(experts),
            parts=table.shape[1],
            columns=columns,
            source=_source(each),
            table=upload(torch.from_numpy(table.view(np.uint8)), gpu.device),
            tables_of_loads=tuple(held.values()),
            num_loads=num_loads,
            load_bytes=load_bytes,
            num_blocks=int(table["num_blocks"].max()),
            has_common_order=all(one is orders[0][0] for of in orders for one in of),
            has_one_order=all(one is of[0] for of in orders for one in of),
            is_plain=all(map(_is_plain, each)),
            has_inverses=all(
                isinstance(w, CudaLinear) or w.inverse_permutation is not None for w in each
            ),
            has_bias=any(w.bias is not None for w in each),
            shared=shared,
            only=_only(each),
            places=(
                _places(table[: len(experts) - shared]),
                _places(table[len(experts) - shared :]),
            ),
        )

    @property
    def num_experts(self) -> int:
        return len(self.matrices)

    @property
    def permutation(self) -> Tensor | None:
        """The order of the rows of all matrices, if it is the same and not that of the features."""
        return None if self.is_plain else _order(self.matrices[0][0])

    @property
    def out_features(self) -> int:
        return self.parts * self.columns

    @property
    def in_features(self) -> int:
        return self.matrices[0][0].in_features

    @property
    def size_bytes(self) -> int:
        return sum(w.size_bytes for parts in self.matrices for w in parts)

    @property
    def k_tiles(self) -> tuple[int, int] | None:
        """Address and number of the k-tiles, if all matrices share them and have integer codes."""
        first = self.matrices[0][0]
        if self.source != "codes" or len(self.tables_of_loads) > 1:
            return None
        if not isinstance(first, CudaQuantLinear) or first.matrix.values != cuda.VALUES["integers"]:
            return None
        return first.matrix.k_tiles, first.matrix.num_k_tiles

    @property
    def common_loads(self) -> Tensor | None:
        """The table of loads, if all matrices have the same one."""
        return self.tables_of_loads[0] if len(self.tables_of_loads) == 1 else None


def grouped(experts: Sequence[tuple[object, ...]]) -> list[tuple[Part, ...]] | None:
    """The parts of each expert, if kernels can index them: quantized or float16 matrices of equal
    sizes, one or two of each expert."""
    found: list[tuple[Part, ...]] = []
    for parts in experts:
        known = tuple(part for part in parts if isinstance(part, CudaLinear | CudaQuantLinear))
        if len(known) < len(parts) or len(parts) > 2:
            return None
        found.append(known)
    each = [w for parts in found for w in parts]
    is_dense = isinstance(each[0], CudaLinear)
    sizes = {(w.out_features, w.in_features) for w in each}
    counts = {len(parts) for parts in found}
    fits = len(sizes) == len(counts) == 1 and len(found) <= cuda.MAX_EXPERTS
    fits = fits and all(isinstance(w, CudaLinear) == is_dense for w in each)
    has_blocks = not is_dense or each[0].in_features % BLOCK_ROWS == 0
    return found if fits and has_blocks else None


def move_together(experts: Sequence[tuple[Part, ...]]) -> None:
    """Moves the matrices side by side, if kernels then compute where they are (`Places`)."""
    quantized = [w for parts in experts for w in parts if isinstance(w, CudaQuantLinear)]
    if _only(quantized):
        CudaQuantLinear.move_together(quantized)


def _source(matrices: Sequence[Part]) -> Source:
    quantized = [w for w in matrices if isinstance(w, CudaQuantLinear)]
    if not quantized:
        return "dense"
    return "small_groups" if any(w.layout.factor_rows for w in quantized) else "codes"


def _only(matrices: Sequence[Part]) -> int:
    """`ExlExpertLinear.only` of these matrices."""
    found = {_only_of(w.plan_key, _kind(w)) for w in matrices if isinstance(w, CudaQuantLinear)}
    return found.pop() if len(found) == 1 else 0


@lru_cache(maxsize=64)
def _only_of(plan_key: tuple[Any, ...], kind: int) -> int:
    loads = loads_of(plan_key)
    bits, blocks = (np.unique(loads[name]) for name in ("bits", "k_tile_blocks"))
    numbers = np.arange(len(loads))
    are_in_order = (loads["first_block"] == K_TILE_BLOCKS * numbers).all() and (
        loads["offset"] == cuda.PANEL_HEAD + numbers * int(loads["bytes"][0])
    ).all()
    if len(bits) > 1 or len(blocks) > 1 or not are_in_order:
        return 0
    return int(bits[0]) | (kind >> 14 & 3) << 8 | kind >> 16 << 16 | int(blocks[0]) << 24


def _places(table: NDArray[np.void]) -> Places | None:
    """Places of the tiles of experts, if they are at equal distances.

    table   ExlExpertMatrix [experts, parts]
    """
    if not len(table):
        return None
    tiles, panel_bytes = table["tiles"].astype(np.int64), np.unique(table["panel_bytes"])
    by_expert, by_part = (np.unique(np.diff(tiles, axis=axis)) for axis in (0, 1))
    if max(len(by_expert), len(by_part), len(panel_bytes)) > 1:
        return None
    expert_bytes, part_bytes = (int(step[0]) if len(step) else 0 for step in (by_expert, by_part))
    return Places(int(tiles[0, 0]), expert_bytes, part_bytes, int(panel_bytes[0]))


def _kind(w: CudaQuantLinear) -> int:
    """`ExlExpertMatrix.kind`."""
    has_floats = w.matrix.scale_dtype == TYPES[torch.float32]
    return int(w.matrix.values) << 14 | int(w.matrix.offset_kind) << 16 | int(has_floats) << 19


def _order(w: Part) -> Tensor | None:
    """The order of the rows of a matrix; None if it is that of the features."""
    return None if isinstance(w, CudaLinear) else w.permutation


def _is_plain(w: Part) -> bool:
    """Whether the order of the rows is that of the features, and no row is padding."""
    if isinstance(w, CudaLinear):
        return True
    is_stored_so = w.layout.features is None and not w.layout.factor_rows
    return is_stored_so and w.inverse_permutation is not None


@lru_cache(maxsize=1024)
def loads_of(plan_key: tuple[Any, ...]) -> NDArray[np.void]:
    """Loads of a column panel. `plan_key`: of a `CudaQuantLinear`."""
    if plan_key[0] == "small":
        return plan_loads(plan_small_groups(*plan_key[1:]))
    return plan_loads(plan_tiles(*plan_key))


def plan_loads(plan: TilePlan) -> NDArray[np.void]:
    """ExlQuantLoad of a column panel: k-tiles, of which short ones of a run are loaded together."""
    loads = []
    ends = np.append(plan.k_tiles["offset"][1:], plan.panel_bytes).astype(np.int64)
    runs = np.append(plan.runs["first_k_tile"], len(plan.k_tiles)).astype(np.int64)
    for run, (first, last) in enumerate(pairwise(runs)):
        is_short = plan.runs["group_k_tiles"][run] == 1
        blocks = int(plan.runs["last_blocks"][run])
        together = max(K_TILE_BLOCKS // blocks, 1) if is_short else 1
        for k_tile in range(int(first), int(last), together):
            end = min(k_tile + together, int(last))
            head = plan.k_tiles[k_tile]
            offset, of_k_tile = int(head["offset"]), int(head["blocks"])
            size, count = int(ends[end - 1]) - offset, end - k_tile
            blocks_in_all = count * of_k_tile
            entry = (offset, head["first_block"], size, head["bits"], count, of_k_tile)
            loads.append((*entry, blocks_in_all, 0))
    return np.array(loads, _LOAD)


def _dense_entry(w: CudaLinear, first_column: int) -> tuple[int, ...]:
    blocks = w.in_features // BLOCK_ROWS
    bias = 0 if w.bias is None else w.bias[first_column:].data_ptr()
    return w.weight[first_column:].data_ptr(), 0, 0, 0, bias, 0, blocks, 0, blocks, 0


def _entry(w: CudaQuantLinear, first_column: int, loads: Tensor, num_loads: int) -> tuple[int, ...]:
    matrix, inverse = w.matrix, w.inverse_permutation
    has_floats = matrix.scale_dtype == TYPES[torch.float32]
    scale_bytes = 4 if has_floats else 2
    offset_bytes = {
        cuda.OFFSETS["middle"]: 0,
        cuda.OFFSETS["zeros"]: 1,
        cuda.OFFSETS["minimums"]: scale_bytes,
        cuda.OFFSETS["small_middle"]: SMALL_GROUPS,
        cuda.OFFSETS["small_minimums"]: scale_bytes + SMALL_GROUPS,
    }
    return (
        matrix.tiles + first_column // PANEL_COLUMNS * matrix.panel_bytes,
        loads.data_ptr(),
        w.permutation.data_ptr(),
        0 if inverse is None else inverse.data_ptr(),
        0 if w.bias is None else w.bias[first_column:].data_ptr(),
        matrix.panel_bytes,
        num_loads,
        _kind(w),
        w.num_blocks,
        PANEL_COLUMNS * (scale_bytes + offset_bytes[matrix.offset_kind]),
    )
