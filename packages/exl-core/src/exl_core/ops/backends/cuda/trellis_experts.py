"""Experts whose matrices have trellis codes (EXL3): a table that kernels index by expert.

`exl/cuda/trellis_experts.h` defines the call. The matrices stay where they are; the table points to
them. Each expert in use is read once per pass. Up to `DECODE_ROWS` rows per expert on average, the
kernel for decode multiplies tiles of 4 or 8 rows and does not decode the weights. With more rows
the batch kernel multiplies tiles of 32 rows. In the batch-invariant mode it takes every number of
rows, where the device has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.trellis import DECODE_ROWS as LINEAR_DECODE_ROWS
from exl_core.ops.backends.cuda.trellis import CudaTrellis
from exl_core.ops.backends.cuda.upload import upload
from exl_core.ops.moe import Routed
from exl_core.ops.weights import HADAMARD
from exl_kernels import cuda
from exl_kernels.cuda_trellis import TrellisExperts, TrellisMatrix

KERNELS = {"decode": 0, "batch": 1, "prompt": 2}
"""Numbers of EXL_EXPERTS_*."""

DECODE_ROWS = 4
"""Rows per expert, on average, up to which the kernel for decode is used."""

BATCH_ROWS = 24
"""Rows per expert, on average, up to which the batch kernel is used, where there are both."""

SPLIT_ROWS = 64
"""Most rows for which the batch and the prompt kernel divide the work as for one row."""

MAX_PAIRS = 1 << 15
"""Most pairs of a row and an expert that are computed at once."""

MAX_WORKSPACE_BYTES = 384 << 20
"""Rows are divided into calls whose workspaces are not larger."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaTrellisExperts:
    """PackedExperts of trellis codes that the kernels index by expert.

    Each expert has one matrix, or a gate and an up, with equal sizes and places in their blocks.
    """

    matrices: tuple[tuple[CudaTrellis, ...], ...]
    parts: int  # matrices of each expert that the table has: one, or two halves of one
    table: Tensor  # ExlTrellisMatrix [experts, parts]
    first: TrellisMatrix  # of the table
    rates: int  # bit tile_words / 8 is set for every number of words that occurs

    halves: CudaTrellisExperts | None = None  # gate and up, if these are the halves of one matrix

    @classmethod
    def of(cls, experts: Sequence[tuple[object, ...]], gpu: Gpu) -> CudaTrellisExperts | None:
        """The parts of each expert as a table; None if kernels cannot index them."""
        found: list[tuple[CudaTrellis, ...]] = []
        for parts in experts:
            known = tuple(part for part in parts if isinstance(part, CudaTrellis))
            if len(known) < len(parts) or len(parts) > 2:
                return None
            found.append(known)
        kinds = {(len(parts), *_kind(one)) for parts in found for one in parts}
        if len(kinds) > 1 or len(found) > cuda.MAX_EXPERTS:
            return None
        whole = cls._of_entries(found, [[one.matrix for one in parts] for parts in found], gpu)
        width = whole.first.out_features // 2
        if whole.parts > 1 or whole.first.out_features % (2 * HADAMARD) != 0:
            return whole
        entries = [[_columns(parts[0].matrix, i * width, width) for i in (0, 1)] for parts in found]
        return replace(whole, halves=cls._of_entries(found, entries, gpu))

    @classmethod
    def _of_entries(
        cls,
        experts: Sequence[tuple[CudaTrellis, ...]],
        entries: Sequence[Sequence[TrellisMatrix]],
        gpu: Gpu,
    ) -> CudaTrellisExperts:
        each = [entry for parts in entries for entry in parts]
        raw = torch.frombuffer(bytearray(b"".join(map(bytes, each))), dtype=torch.uint8)
        rates = 0
        for entry in each:
            rates |= 1 << entry.tile_words // 8
        return cls(tuple(experts), len(entries[0]), upload(raw, gpu.device), each[0], rates)

    @property
    def num_experts(self) -> int:
        return len(self.matrices)

    @property
    def out_features(self) -> int:
        return sum(one.out_features for one in self.matrices[0])

    @property
    def in_features(self) -> int:
        return self.matrices[0][0].in_features

    @property
    def size_bytes(self) -> int:
        return sum(w.size_bytes for parts in self.matrices for w in parts)


def _kind(w: CudaTrellis) -> tuple[object, ...]:
    """Properties that the matrices of a table share."""
    one = w.layout
    return one.out_features, one.in_features, one.first_out, one.first_in, one.codebook


def _columns(w: TrellisMatrix, first: int, columns: int) -> TrellisMatrix:
    """`columns` columns of a matrix from `first` on, multiples of 128."""
    part: TrellisMatrix = TrellisMatrix.from_buffer_copy(w)
    part.words += first * w.k * w.tile_words // 128  # tile_words 16-bit words per 16 x 16 weights
    part.svh += 2 * first
    if w.bias:
        part.bias += 4 * first
    part.n = -(-(w.first_out + columns) // HADAMARD) * HADAMARD
    part.out_features = columns
    return part


def pair_of(
    gate_up: object, down: object, *, is_gated: bool
) -> tuple[CudaTrellisExperts, CudaTrellisExperts] | None:
    """gate_up, or up alone, and down, if one call can compute them."""
    if not isinstance(gate_up, CudaTrellisExperts) or not isinstance(down, CudaTrellisExperts):
        return None
    wide = gate_up.halves if is_gated and gate_up.parts == 1 else gate_up
    fits = wide is not None and wide.parts == (2 if is_gated else 1) and down.parts == 1
    if wide is None or not fits or wide.first.codebook != down.first.codebook:
        return None
    return wide, down


def _kernel(gpu: Gpu, mean_rows: float) -> Literal["decode", "batch", "prompt"]:
    """Kernel of the products, by the mean number of rows per expert."""
    has_batch = gpu.trellis_max_rows > LINEAR_DECODE_ROWS
    if gpu.is_invariant:
        return "batch" if has_batch else "decode"
    if mean_rows <= DECODE_ROWS:
        return "decode"
    has_prompt = torch.cuda.get_device_capability(gpu.device)[0] == 9
    if has_prompt and mean_rows > BATCH_ROWS:
        return "prompt"
    return "batch" if has_batch else "decode"


def compute(
    gpu: Gpu,
    x: Tensor,
    routed: Routed,
    matrices: tuple[CudaTrellisExperts, CudaTrellisExperts],
    y: Tensor,
    *,
    gate: int,
    is_added: bool,
) -> None:
    """Writes `RoutedOps.expert_mlp` to y [m, d] float32, or adds it. `gate`: the activation."""
    wide, down = matrices
    top_k = routed.ids.shape[1]
    kernel = _kernel(gpu, routed.ids.numel() / wide.num_experts)
    args = TrellisExperts(
        wide=wide.table.data_ptr(),
        narrow=down.table.data_ptr(),
        of_wide=wide.first,
        of_narrow=down.first,
        wide_rates=wide.rates,
        narrow_rates=down.rates,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        x_dtype=TYPES[x.dtype],
        top_k=top_k,
        experts=wide.num_experts,
        parts=wide.parts,
        gate=gate,
        is_added=is_added,
        kernel=KERNELS[kernel],
        is_split=gpu.is_invariant or len(x) <= SPLIT_ROWS,
    )
    most = max(MAX_PAIRS // top_k, 1)
    args.m = min(len(x), most)
    while gpu.size("trellis_experts_workspace", args) > MAX_WORKSPACE_BYTES and args.m > 1:
        most = (args.m + 1) // 2
        args.m = most
    for first in range(0, len(x), most):
        rows = slice(first, min(first + most, len(x)))
        ids, weights = routed.ids[rows].contiguous(), routed.weights[rows].contiguous()
        args.m = rows.stop - rows.start
        size = gpu.size("trellis_experts_workspace", args)
        workspace = gpu.empty(size, dtype=torch.uint8)
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size
        args.x, args.y = x[rows].data_ptr(), y[rows].data_ptr()
        args.ids, args.weights = ids.data_ptr(), weights.data_ptr()
        gpu.call("trellis_experts", args)
