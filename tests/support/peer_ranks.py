"""Ranks of one process that sum through memory of GPUs, and their matrices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.peers import PeerBuffers
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.weights import Codebook, TrellisLayout
from exl_core.parallel.peers import MAX_ROWS
from support.trellis import random_exl3

ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64)
ROUNDS = 7  # more than twice the number of stages
UNSENT = -1  # EXL_CUDA_UNSENT as int32


class Ranks:
    """Ranks of one process, with a buffer each: on one GPU, or on the GPUs of several tables."""

    def __init__(
        self,
        ops: CudaTable | Sequence[CudaTable],
        number: int,
        width: int,
        vocab: int = 1,
        large: int = 0,
    ) -> None:
        tables = [ops] * number if isinstance(ops, CudaTable) else ops
        size = PeerBuffers((0,) * number, MAX_ROWS, width, vocab, large).size_bytes
        self.buffers = [
            torch.zeros(size // 4, dtype=torch.int32, device=table.device) for table in tables
        ]
        addresses = tuple(one.data_ptr() for one in self.buffers)
        self.places = places = PeerBuffers(addresses, MAX_ROWS, width, vocab, large)
        self.all = [table.peer_sums(rank, places) for rank, table in enumerate(tables)]

    def count_from(self, start: int) -> None:
        """Sets all counters of large sums."""
        for rank, (one, buffer) in enumerate(zip(self.all, self.buffers, strict=True)):
            assert one._large is not None
            one._large._rounds.fill_(start)
            buffer[(self.places.flags_at(rank) - buffer.data_ptr()) // 4 :] = start

    def begin(self, rows: int) -> None:
        for one in self.all:
            one.begin(rows)

    def end(self) -> None:
        """Ends a pass, which leaves all buffers empty."""
        for one in self.all:
            one.end()
        assert all(bool((one == UNSENT).all()) for one in self.buffers)


def in_order(x: Tensor | None, parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0]) if x is None else x.clone()
    for part in parts:
        total += part
    return total


def connected_tables(number: int) -> list[CudaTable]:
    """Tables of as many GPUs, which can access each other's memory."""
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")
    for one, other in permutations(range(number), 2):
        torch.ones(1, device=f"cuda:{one}").to(f"cuda:{other}")  # torch turns access on
    tables = [get_table(f"cuda:{index}", threads=1) for index in range(number)]
    return [table for table in tables if isinstance(table, CudaTable)]


def trellis(
    ops: CudaTable,
    n: int,
    k: int,
    seed: int,
    *,
    rate: float = 4,
    book: Codebook = "mul1",
    first_out: int = 0,
) -> PackedLinear:
    """Random matrix of trellis codes with a bias. Its columns begin at `first_out` of a block."""
    layer = random_exl3(seed, rate, book, rows=k, columns=first_out + n)
    words = layer.words.shape[2]
    w = ops.new_linear(TrellisLayout(n, k, words, book, first_out, has_bias=True))
    bias = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    ops.fill_linear(w, 0, layer.columns(bias))
    return w
