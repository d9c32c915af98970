"""Quantized matrices of the experts of one layer: a table that kernels index by expert.

`exl/cuda/moe.h` defines the table. The matrices stay where they are; the table points to them.
Experts may have layouts of their own. If all have the same order of rows, a row of inputs is
prepared once for all of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.quantized import (
    K_TILE_BLOCKS,
    PANEL_COLUMNS,
    CudaQuantLinear,
    TilePlan,
    plan_tiles,
    shared_table,
)
from exl_core.ops.backends.cuda.upload import upload
from exl_core.ops.weights import GroupRun
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


@dataclass(frozen=True, slots=True, eq=False)
class CudaExperts:
    """PackedExperts that the kernels index by expert.

    Each expert has `parts` matrices: one, or a gate and an up of equal sizes.
    """

    matrices: tuple[tuple[CudaQuantLinear, ...], ...]
    table: Tensor  # ExlExpertMatrix [experts, parts]
    tables_of_loads: tuple[Tensor, ...]  # keeps them alive
    num_loads: int  # the largest number of any matrix
    load_bytes: int  # the largest number of any load
    num_blocks: int  # the largest number of any matrix
    has_common_order: bool  # all matrices have the same order of rows
    has_one_order: bool  # the parts of each expert have the same order of rows
    is_plain: bool  # that order is the order of the features, and no row is padding
    has_inverses: bool  # no row of any matrix is padding

    @classmethod
    def of(cls, experts: Sequence[tuple[CudaQuantLinear, ...]], gpu: Gpu) -> CudaExperts:
        table = np.zeros((len(experts), len(experts[0])), _MATRIX)
        held: dict[int, Tensor] = {}
        num_loads = load_bytes = 0
        for expert, parts in enumerate(experts):
            for part, w in enumerate(parts):
                loads = _loads_of(w.plan_key)
                on_device = shared_table(
                    gpu.device, ("loads", w.plan_key), partial(loads.view, np.uint8)
                )
                held[on_device.data_ptr()] = on_device
                table[expert, part] = _entry(w, on_device, len(loads))
                num_loads = max(num_loads, len(loads))
                load_bytes = max(load_bytes, int(loads["bytes"].max()))
        each = [w for parts in experts for w in parts]
        has_inverses = all(w.inverse_permutation is not None for w in each)
        return cls(
            matrices=tuple(experts),
            table=upload(torch.from_numpy(table.view(np.uint8)), gpu.device),
            tables_of_loads=tuple(held.values()),
            num_loads=num_loads,
            load_bytes=load_bytes,
            num_blocks=max(w.num_blocks for w in each),
            has_common_order=all(w.permutation is each[0].permutation for w in each),
            has_one_order=all(
                w.permutation is parts[0].permutation for parts in experts for w in parts
            ),
            is_plain=has_inverses and all(w.layout.features is None for w in each),
            has_inverses=has_inverses,
        )

    @property
    def num_experts(self) -> int:
        return len(self.matrices)

    @property
    def parts(self) -> int:
        return len(self.matrices[0])

    @property
    def columns(self) -> int:
        """Outputs of each part."""
        return self.matrices[0][0].out_features

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
    def common_loads(self) -> Tensor | None:
        """The table of loads, if all matrices have the same one."""
        return self.tables_of_loads[0] if len(self.tables_of_loads) == 1 else None


def grouped(experts: Sequence[tuple[object, ...]]) -> list[tuple[CudaQuantLinear, ...]] | None:
    """The parts of each expert, if kernels can index them: quantized matrices of equal sizes, one
    or two of each expert, without small groups."""
    found = []
    for parts in experts:
        quantized = tuple(part for part in parts if isinstance(part, CudaQuantLinear))
        has_small_groups = any(part.layout.factor_rows for part in quantized)
        if len(quantized) < len(parts) or len(parts) > 2 or has_small_groups:
            return None
        found.append(quantized)
    sizes = {(w.out_features, w.in_features) for parts in found for w in parts}
    counts = {len(parts) for parts in found}
    fits = len(sizes) == len(counts) == 1 and len(found) <= cuda.MAX_EXPERTS
    return found if fits else None


@lru_cache(maxsize=64)
def _loads_of(plan_key: tuple[tuple[GroupRun, ...], int, int]) -> NDArray[np.void]:
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


def _entry(w: CudaQuantLinear, loads: Tensor, num_loads: int) -> tuple[int, ...]:
    matrix, inverse = w.matrix, w.inverse_permutation
    has_floats = matrix.scale_dtype == TYPES[torch.float32]
    scale_bytes = 4 if has_floats else 2
    offset_bytes = {
        cuda.OFFSETS["middle"]: 0,
        cuda.OFFSETS["zeros"]: 1,
        cuda.OFFSETS["minimums"]: scale_bytes,
    }
    return (
        matrix.tiles,
        loads.data_ptr(),
        w.permutation.data_ptr(),
        0 if inverse is None else inverse.data_ptr(),
        0 if w.bias is None else w.bias.data_ptr(),
        matrix.panel_bytes,
        num_loads,
        matrix.values << 14 | matrix.offset_kind << 16 | int(has_floats) << 19,
        w.num_blocks,
        PANEL_COLUMNS * (scale_bytes + offset_bytes[matrix.offset_kind]),
    )
