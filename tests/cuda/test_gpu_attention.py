"""Attention over a paged cache on a GPU: every format, lengths of all kinds, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.ops.cache_rows import decode_rows, encode_rows, head_dim_of, row_size
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
F32, F16, F8 = torch.float32, torch.float16, torch.float8_e4m3fn
FORMATS = {
    "f32": (F32, F32),
    "f16": (F16, F16),
    "f8": (F8, F8),
    "q8": (torch.int8, torch.int8),
    "q6": (torch.int8, torch.uint8),
    "q4": (torch.uint8, torch.uint8),
}
ONE_ROW = [(0, 1), (7, 1), (15, 1), (16, 1), (299, 1), (31, 1), (1500, 1), (63, 1)]
MIXED = [(0, 1), (7, 1), (299, 1), (0, 37), (45, 70), (131, 2), (9, 0), (600, 1), (0, 9), (3, 16),
         (250, 17), (1000, 3), (20, 130)]  # fmt: skip


@pytest.fixture
def rng() -> torch.Generator:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator(DEVICE).manual_seed(seed)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(torch.device(DEVICE))


@dataclass(frozen=True)
class PagedBatch:
    """Sequences of (past length, rows), their pages scattered over the cache."""

    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    row_starts: Tensor
    past_lens: Tensor
    sequences: list[tuple[int, int]]

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.sequences)

    def rows_of(self, cache: Tensor, seq: int) -> Tensor:
        """All positions of a sequence: float64 [kv_heads, end, d]."""
        at, page_size = torch.arange(sum(self.sequences[seq]), device=DEVICE), cache.shape[2]
        pages = self.page_table[seq].long()[at // page_size]
        stored = cache.view(torch.uint8)[pages, :, at % page_size]
        return decode_rows(stored.transpose(0, 1).contiguous().view(cache.dtype))

    def only(self, seq: int) -> PagedBatch:
        """One of the sequences, by itself."""
        rows = self.sequences[seq][1]
        return replace(
            self,
            page_table=self.page_table[seq : seq + 1].contiguous(),
            row_starts=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
            past_lens=self.past_lens[seq : seq + 1].contiguous(),
            sequences=[self.sequences[seq]],
        )


def paged_batch(
    rng: torch.Generator, sequences: list[tuple[int, int]], name: str, d: int, *, kv_heads: int,
    page_size: int,
) -> PagedBatch:  # fmt: skip
    """Pages are handed out in random order; what no sequence has written is NaN."""
    counts = [-(-(past + rows) // page_size) for past, rows in sequences]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=rng, device=DEVICE)
    page_table = torch.zeros(len(sequences), max(counts), dtype=torch.int32, device=DEVICE)
    caches = []
    for cache_type in FORMATS[name]:
        shape = (num_pages, kv_heads, page_size, row_size(cache_type, d) * cache_type.itemsize)
        # All ones is NaN in every type, and in the scales of codes.
        ones = torch.full(shape, 255, dtype=torch.uint8, device=DEVICE)
        caches.append(ones.view(cache_type))
    used = 0
    for seq, (past, rows) in enumerate(sequences):
        pages = order[used : used + counts[seq]]
        used += counts[seq]
        page_table[seq, : len(pages)] = pages.int()
        at = torch.arange(past + rows, device=DEVICE)
        for cache in caches:
            fresh = torch.randn(past + rows, kv_heads, d, generator=rng, device=DEVICE)
            place = pages[at // page_size], slice(None), at % page_size
            cache.view(torch.uint8)[place] = encode_rows(fresh, cache.dtype).view(torch.uint8)
    starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0)
    past_lens = torch.tensor([past for past, _ in sequences], dtype=torch.int32, device=DEVICE)
    return PagedBatch(
        caches[0], caches[1], page_table, starts.int().to(DEVICE), past_lens, sequences
    )


@dataclass(frozen=True)
class Case:
    """A batch, and what attention is asked to do with it."""

    batch: PagedBatch
    q: Tensor  # [rows, q_heads, d], of float16 or float32
    window: int = 0
    softcap: float = 0.0
    max_keys: int = 0  # 0: what it is

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def exact(self) -> Tensor:
        """As the reference table has it, in float64, on the GPU."""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=DEVICE)
        first = 0
        for seq, (past, rows) in enumerate(self.batch.sequences):
            if rows == 0:
                continue
            keys, values = (
                self.batch.rows_of(cache, seq)
                for cache in (self.batch.key_cache, self.batch.value_cache)
            )
            group = self.q.shape[1] // keys.shape[0]
            queries = self.q[first : first + rows].double().transpose(0, 1)
            queries = queries.reshape(-1, group, rows, queries.shape[2])
            scores = queries @ keys[:, None].transpose(2, 3) * self.scale
            if self.softcap > 0:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            at = torch.arange(past + rows, device=DEVICE)
            ages = at[past:, None] - at
            seen = (ages >= 0) & (ages < (self.window or past + rows))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first : first + rows] = (weights @ values[:, None]).flatten(0, 1).transpose(0, 1)
            first += rows
        return out

    def call(self, gpu: Gpu, q: Tensor, q_stride: int, out: Tensor, out_stride: int) -> None:
        keys, values = self.batch.key_cache, self.batch.value_cache
        rows, q_heads, d = self.q.shape
        longest = max(sum(sequence) for sequence in self.batch.sequences)
        workspace = gpu.workspace("attention", rows, q_heads, d)
        args = cuda.Attention(
            q=q.data_ptr(),
            q_stride=q_stride,
            out=out.data_ptr(),
            out_stride=out_stride,
            dtype=TYPES[q.dtype],
            rows=rows,
            q_heads=q_heads,
            seqs=len(self.batch.sequences),
            page_table=self.batch.page_table.data_ptr(),
            row_starts=self.batch.row_starts.data_ptr(),
            past_lens=self.batch.past_lens.data_ptr(),
            table_stride=self.batch.page_table.shape[1],
            max_rows=max(rows for _, rows in self.batch.sequences),
            max_keys=max(self.max_keys, longest),
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
        )
        pages, kv_heads, page_size, _ = keys.shape
        cache = cuda.Cache(
            keys.data_ptr(),
            values.data_ptr(),
            TYPES[keys.dtype],
            TYPES[values.dtype],
            kv_heads,
            head_dim_of(keys),
            page_size,
            pages,
        )
        gpu.call("attention", args, cache)

    def run(self, gpu: Gpu) -> Tensor:
        """[rows, q_heads, d] on the GPU, from queries in a row of other things."""
        rows, q_heads, d = self.q.shape
        width = q_heads * d
        wide = torch.full((rows, width + 64), torch.nan, dtype=self.q.dtype, device=DEVICE)
        wide[:, 32 : 32 + width] = self.q.view(rows, width)
        out = torch.full((rows, width + 8), torch.nan, dtype=self.q.dtype, device=DEVICE)
        self.call(gpu, wide[:, 32:], wide.stride(0), out, out.stride(0))
        assert out[:, width:].isnan().all()
        return out[:, :width].reshape(rows, q_heads, d)


def make_case(
    rng: torch.Generator,
    sequences: list[tuple[int, int]],
    name: str,
    d: int,
    heads: tuple[int, int] = (8, 2),
    *,
    page_size: int = 256,
    dtype: torch.dtype = F16,
    window: int = 0,
    softcap: float = 0.0,
    loud: float = 1.0,
) -> Case:
    q_heads, kv_heads = heads
    batch = paged_batch(rng, sequences, name, d, kv_heads=kv_heads, page_size=page_size)
    q = (loud * torch.randn(batch.rows, q_heads, d, generator=rng, device=DEVICE)).to(dtype)
    return Case(batch, q, window, softcap)


def check(gpu: Gpu, case: Case, bound: float = 2e-3) -> Tensor:
    """As a whole within the bound, and no vector far off."""
    out = case.run(gpu)
    exact = case.exact()
    error = out.double() - exact
    assert error.norm() <= bound * exact.norm(), float(error.norm() / exact.norm())
    each = error.norm(dim=-1) / exact.norm(dim=-1)
    assert each.max() <= 6 * bound, float(each.max())
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (9, 3), (16, 1)], ids=str)
def test_one_row_of_each_sequence(
    gpu: Gpu, rng: torch.Generator, name: str, d: int, heads: tuple[int, int]
) -> None:
    check(gpu, make_case(rng, ONE_ROW, name, d, heads))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
def test_few_and_many_rows_in_one_call(
    gpu: Gpu, rng: torch.Generator, name: str, d: int, heads: tuple[int, int]
) -> None:
    check(gpu, make_case(rng, MIXED, name, d, heads, page_size=16))


@pytest.mark.parametrize("name", ["f32", "f16", "f8"])
@pytest.mark.parametrize("d", [8, 72, 80, 120, 200])
def test_heads_of_other_sizes(gpu: Gpu, rng: torch.Generator, name: str, d: int) -> None:
    check(gpu, make_case(rng, MIXED, name, d, (4, 2), page_size=64))


@pytest.mark.parametrize("name", FORMATS)
def test_float32_queries_and_results(gpu: Gpu, rng: torch.Generator, name: str) -> None:
    check(gpu, make_case(rng, MIXED, name, 64, dtype=F32))


@pytest.mark.parametrize("name", ["f16", "q6", "q4"])
@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("window", [1, 5, 16, 63, 64, 65, 200, 10_000])
def test_a_window_hides_older_keys(
    gpu: Gpu, rng: torch.Generator, name: str, page_size: int, window: int
) -> None:
    check(gpu, make_case(rng, MIXED, name, 64, page_size=page_size, window=window))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("name", ["f16", "q4"])
def test_a_softcap_bends_scores(gpu: Gpu, rng: torch.Generator, name: str, window: int) -> None:
    case = make_case(rng, MIXED, name, 128, window=window, softcap=15.0, loud=8.0)
    check(gpu, case, 6e-3)  # scores of up to 15: their roundings count as much more


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("name", ["f16", "q4"])
def test_every_number_of_rows(gpu: Gpu, rng: torch.Generator, name: str, rows: int) -> None:
    check(gpu, make_case(rng, [(1500, rows)], name, 128))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("past", [4095, 9999])
def test_long_sequences_are_split_the_same_way_each_time(
    gpu: Gpu, rng: torch.Generator, name: str, past: int
) -> None:
    case = make_case(rng, [(past, 1)], name, 128, (32, 8))
    first = check(gpu, case)
    for _ in range(20):
        assert torch.equal(case.run(gpu), first)
    workspace = gpu.workspace("attention", 1, 32, 128)
    assert not workspace[: 4 * 16384].any()


@pytest.mark.parametrize("name", ["f16", "q8", "q4"])
def test_a_loose_bound_on_the_keys_will_do(gpu: Gpu, rng: torch.Generator, name: str) -> None:
    case = make_case(rng, ONE_ROW, name, 128, (32, 8))
    check(gpu, replace(case, max_keys=100_000))


@pytest.mark.parametrize("sequences", [ONE_ROW, MIXED, [(0, 200)]], ids=["one", "mixed", "many"])
@pytest.mark.parametrize("name", ["f16", "q6"])
def test_results_may_replace_the_queries(
    gpu: Gpu, rng: torch.Generator, name: str, sequences: list[tuple[int, int]]
) -> None:
    case = make_case(rng, sequences, name, 128, (8, 2))
    rows, q_heads, d = case.q.shape
    qkv = torch.randn(rows, (q_heads + 4) * d, generator=rng, device=DEVICE).half()
    before = qkv.clone()
    qkv[:, : q_heads * d] = case.q.view(rows, -1)

    case.call(gpu, qkv, qkv.stride(0), qkv, qkv.stride(0))

    assert torch.equal(qkv[:, q_heads * d :], before[:, q_heads * d :])
    assert torch.equal(qkv[:, : q_heads * d].reshape(rows, q_heads, d), case.run(gpu))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
def test_a_nan_in_the_cache_is_not_hidden(
    gpu: Gpu, rng: torch.Generator, rows: int, which: str
) -> None:
    case = make_case(rng, [(5, rows)], "f16", 64, (2, 1), page_size=16)
    getattr(case.batch, which)[int(case.batch.page_table[0, 0]), 0, 2, 3] = torch.nan

    out = case.run(gpu)

    assert (out if which == "key_cache" else out[..., 3]).isnan().all()


def test_a_captured_graph_follows_the_lengths(gpu: Gpu, rng: torch.Generator) -> None:
    """What is captured for short sequences is right for long ones."""
    case = make_case(rng, [(3000, 1), (700, 1), (1, 1)], "f16", 128, (8, 2))
    exact = case.run(gpu)
    q = case.q
    out = torch.full_like(q, torch.nan)
    past = case.batch.past_lens
    right = past.clone()
    past.zero_()
    loose = replace(case, max_keys=8192)
    loose.call(gpu, q, q.stride(0), out, out.stride(0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loose.call(gpu, q, q.stride(0), out, out.stride(0))
    past.copy_(right)
    out.fill_(torch.nan)

    graph.replay()

    assert (out - exact).double().norm() <= 1e-3 * exact.double().norm()


def test_a_sequence_does_not_depend_on_its_neighbours(gpu: Gpu, rng: torch.Generator) -> None:
    """Up to how its keys are split, which follows the number of sequences."""
    case = make_case(rng, MIXED, "q8", 128)
    together = case.run(gpu)
    first = 0
    for seq, (_, rows) in enumerate(MIXED):
        if rows == 0:
            continue
        own = slice(first, first + rows)
        one = replace(case, batch=case.batch.only(seq), q=case.q[own].contiguous()).run(gpu)
        assert (one - together[own]).double().norm() <= 1e-3 * one.double().norm()
        first += rows


def test_the_bound_is_the_references(rng: torch.Generator) -> None:
    """What these tests compare with is what the reference table computes."""
    case = make_case(rng, [(9, 1), (30, 20)], "q6", 64, page_size=16, window=13, softcap=9.0)
    batch = case.batch
    right = ReferenceTable(1).paged_attention(
        case.q.float().cpu(),
        CacheLayer(batch.key_cache.cpu(), batch.value_cache.cpu()),
        AttentionRows(batch.page_table.cpu(), batch.row_starts.cpu(), batch.past_lens.cpu()),
        Scoring(case.scale, window=13, softcap=9.0),
    )
    assert (case.exact().cpu().flatten(1) - right).norm() <= 1e-6 * right.norm()
