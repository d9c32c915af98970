"""Layouts of `exl/cuda/linear.h` written a second time: codes of a block, prepared inputs; and a
random matrix.

The layouts are slow and plain, and independent of the kernels that pack and prepare.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.linear import PackedLinear
from exl_core.ops.weights import GroupedColumns, GroupedLayout, GroupRun

BLOCK_ROWS = 32
CHUNK_ROWS = 64
WIDTHS = (2, 3, 4, 5, 6, 8)
# Word and bit at which the code of each pair begins. PIECES has the codes that are split.
PLACES = {
    2: "0.0 0.8 1.0 1.8 0.2 0.10 1.2 1.10 0.4 0.12 1.4 1.12 0.6 0.14 1.6 1.14",
    3: "0.0 0.3 1.0 2.0 1.3 1.9 2.3 2.9 0.6 0.9 0.12 1.6 1.12 2.6 2.12",
    4: "0.0 1.0 2.0 3.0 0.4 1.4 2.4 3.4 0.8 1.8 2.8 3.8 0.12 1.12 2.12 3.12",
    5: "0.0 1.0 2.0 3.0 4.0 0.10 1.10 2.10 0.5 1.5 2.5 3.5 4.5 3.10 4.10",
    6: "0.0 1.0 2.0 3.0 4.0 5.0 0.10 1.10 2.10 3.10 4.10 5.10",
    8: "0.0 1.0 2.0 3.0 0.8 1.8 2.8 3.8 4.0 5.0 6.0 7.0 4.8 5.8 6.8 7.8",
}
# Pair, first bit of the code, bits, word and bit.
PIECES = {
    3: [(15, i, 1, i, 15) for i in range(3)],
    5: [(15, i, 1, i, 15) for i in range(5)],
    6: [(12 + i, 0, 2, 4 + i // 2, 6 + i % 2 * 2) for i in range(4)]
    + [(12 + i, 2, 4, i, 6) for i in range(4)],
}


def pieces(bits: int) -> list[tuple[int, int, int, int, int]]:
    """All pieces of a lane's codes: pair, first bit of the code, bits, word and bit."""
    whole = (place.split(".") for place in PLACES[bits].split())
    found = [(pair, 0, bits, int(word), int(bit)) for pair, (word, bit) in enumerate(whole)]
    return found + PIECES.get(bits, [])


def prepared_chunk(rows: Tensor) -> Tensor:
    """Prepared form of a chunk: rows [m, 32 * blocks] in a matrix's permutation, m up to 64."""
    m, padded_k = rows.shape
    if m == 1:
        return rows.flatten()
    padded_m = next(count for count in (8, 16, 32, 64) if count >= m)
    blocks = padded_k // BLOCK_ROWS
    full = rows.new_zeros(padded_m, padded_k)
    full[:m] = rows
    if padded_m > 8 and torch.cuda.get_device_capability() == (9, 0):
        # block, 8 t + 4 s + 2 h + e -> block, 2 s + h, row, 2 t + e
        split = full.reshape(padded_m, blocks, 4, 4, 2)
        return split.permute(1, 3, 0, 2, 4).flatten()
    return full.reshape(padded_m, blocks, BLOCK_ROWS).transpose(0, 1).flatten()


def matrix(ops: CudaTable, n: int, k: int, seed: int) -> PackedLinear:
    """Random matrix of two bit widths with a random permutation."""
    rng = torch.Generator().manual_seed(seed)
    runs = (GroupRun(5, 1, 128), GroupRun(4, k // 128 - 1, 128))
    features = torch.randperm(k, generator=rng).int()
    w = ops.new_linear(GroupedLayout(n, k, runs, features, torch.float16, "middle", False))
    codes = torch.randint(0, 16, (k, n), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(k // 128, n, generator=rng) * 0.3 / k**0.5).half()
    columns = GroupedColumns("bytes", codes, scales=scales, offsets=None, bias=None)
    ops.fill_linear(w, 0, columns)
    return w
