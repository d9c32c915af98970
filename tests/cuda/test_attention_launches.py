"""Attention on a GPU: captured graphs, workspaces, results in place of queries, bounds of lengths.

`tests/kernels/test_attention.py` compares its results with float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.backends.cuda.attention import Attention, CudaBatch
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.cache_rows import encode_rows
from support.kv_caches import FORMATS

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
PAGE_SIZE, KV_HEADS, Q_HEADS, DIM = 256, 2, 8, 128
ONE_ROW = [(0, 1), (7, 1), (15, 1), (16, 1), (299, 1), (31, 1), (1500, 1), (63, 1)]
MIXED = [(0, 1), (299, 1), (0, 37), (45, 70), (131, 2), (9, 0), (3, 16), (1000, 3), (20, 130)]
SCORING = Scoring(DIM**-0.5)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(5)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(DEVICE)


@dataclass(frozen=True)
class Case:
    """Queries [rows, Q_HEADS * DIM] of a batch over caches with pages in random order."""

    attention: Attention
    batch: CudaBatch
    cache: CacheLayer
    q: Tensor

    def run(self, q: Tensor, out: Tensor) -> Tensor:
        self.attention.paged_attention(q, out, self.batch, self.cache, SCORING, heads=Q_HEADS)
        return out


def make_case(gpu: Gpu, rng: torch.Generator, sequences: list[tuple[int, int]], name: str) -> Case:
    counts = [-(-(past + rows) // PAGE_SIZE) for past, rows in sequences]
    order = torch.randperm(sum(counts), generator=rng, device=DEVICE).int().cpu()
    page_table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    used = 0
    for seq, count in enumerate(counts):
        page_table[seq, :count] = order[used : used + count]
        used += count
    caches = [
        encode_rows(
            torch.randn(sum(counts), KV_HEADS, PAGE_SIZE, DIM, generator=rng, device=DEVICE), kind
        )
        for kind in FORMATS[name]
    ]
    starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0).int()
    pasts = torch.tensor([past for past, _ in sequences], dtype=torch.int32)
    none = torch.empty(0)
    attention = Attention(gpu)
    batch = attention.bind(AttentionRows(page_table, starts, pasts), none, none, none)
    rows = sum(rows for _, rows in sequences)
    q = torch.randn(rows, Q_HEADS * DIM, generator=rng, device=DEVICE).half()
    return Case(attention, batch, CacheLayer(*caches), q)


@pytest.mark.parametrize("sequences", [ONE_ROW, MIXED, [(0, 200)]], ids=["one", "mixed", "many"])
@pytest.mark.parametrize("name", ["f16", "q6"])
def test_results_may_replace_the_queries(
    gpu: Gpu, rng: torch.Generator, name: str, sequences: list[tuple[int, int]]
) -> None:
    case = make_case(gpu, rng, sequences, name)
    rows, width = case.q.shape
    qkv = torch.randn(rows, width + 4 * DIM, generator=rng, device=DEVICE).half()
    before = qkv.clone()
    qkv[:, :width] = case.q

    case.run(qkv[:, :width], qkv[:, :width])

    assert torch.equal(qkv[:, width:], before[:, width:])
    assert torch.equal(qkv[:, :width], case.run(case.q, torch.empty_like(case.q)))


@pytest.mark.parametrize("sequences", [ONE_ROW, MIXED], ids=["one", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gaps_between_rows_are_neither_read_nor_written(
    gpu: Gpu, rng: torch.Generator, sequences: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    case = make_case(gpu, rng, sequences, "f16")
    q = case.q.to(dtype)
    rows, width = q.shape
    wide = torch.full((rows, width + 64), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, 32 : 32 + width] = q
    out = torch.full((rows, width + 8), torch.nan, dtype=dtype, device=DEVICE)

    case.run(wide[:, 32 : 32 + width], out[:, :width])

    assert out[:, width:].isnan().all()
    assert torch.equal(out[:, :width], case.run(q, torch.empty_like(q)))


@pytest.mark.parametrize("name", ["f16", "q8", "q4"])
def test_a_loose_bound_on_the_keys_is_allowed(gpu: Gpu, rng: torch.Generator, name: str) -> None:
    case = make_case(gpu, rng, ONE_ROW, name)
    exact = case.run(case.q, torch.empty_like(case.q)).double()
    loose = replace(case, batch=replace(case.batch, max_keys=100_000))
    out = loose.run(case.q, torch.full_like(case.q, torch.nan)).double()
    assert (out - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("past", [4095, 9999])
def test_split_keys_leave_the_counters_of_the_workspace_zero(
    gpu: Gpu, rng: torch.Generator, name: str, past: int
) -> None:
    case = make_case(gpu, rng, [(past, 1)], name)
    first = case.run(case.q, torch.empty_like(case.q))
    assert torch.equal(case.run(case.q, torch.empty_like(case.q)), first)
    assert not gpu.workspace("attention", 1, Q_HEADS, DIM)[: 4 * 16384].any()


def test_a_captured_graph_follows_the_lengths(gpu: Gpu, rng: torch.Generator) -> None:
    """A graph captured for short sequences is right for long ones."""
    case = make_case(gpu, rng, [(3000, 1), (700, 1), (1, 1)], "f16")
    exact = case.run(case.q, torch.empty_like(case.q)).double()
    out = torch.full_like(case.q, torch.nan)
    past = case.batch.rows.past_lens
    lengths = past.clone()
    past.zero_()
    loose = replace(case, batch=replace(case.batch, max_keys=8192))
    loose.run(case.q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loose.run(case.q, out)
    past.copy_(lengths)
    out.fill_(torch.nan)

    graph.replay()

    assert (out.double() - exact).norm() <= 1e-3 * exact.norm()
