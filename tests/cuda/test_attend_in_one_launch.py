"""Attention that processes and caches its rows itself, against a launch for the rows and one for
attention: the same bits. `test_rope_write.py` and `tests/kernels/test_attention.py` compare those
with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, HeadNorms, KeySmoothing, Scoring
from exl_core.ops.backends.cuda.attention import Attention, CudaBatch
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.cache_rows import encode_rows
from support.kv_caches import FORMATS

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
PAGE_SIZE, KV_HEADS = 64, 2
PASTS = [0, 1, 15, 16, 31, 63, 64, 700, 2100, 4095]


@pytest.fixture
def rng() -> torch.Generator:
    """A new seed in every run; a failure prints it."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator(DEVICE).manual_seed(seed)


@pytest.fixture(scope="module", params=[False, True], ids=["", "invariant"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(DEVICE, is_invariant=request.param)


@dataclass(frozen=True)
class Case:
    """One row for each sequence, over caches with pages in random order."""

    attention: Attention
    batch: CudaBatch
    cache: CacheLayer
    qkv: Tensor
    q_heads: int
    scoring: Scoring
    norms: HeadNorms
    smoothing: KeySmoothing | None
    sinks: Tensor | None

    def copied(self) -> CacheLayer:
        caches = self.cache.keys, self.cache.values
        return CacheLayer(*(one.view(torch.uint8).clone().view(one.dtype) for one in caches))

    def run_apart(self, cache: CacheLayer) -> Tensor:
        qkv = self.qkv.clone()
        self.attention.rope_write(
            qkv, self.batch, cache, norms=self.norms, smoothing=self.smoothing
        )
        q = qkv[:, : self.q_heads * self.cache_dim]
        out = torch.full_like(q.contiguous(), torch.nan)
        heads = self.q_heads
        self.attention.paged_attention(
            q, out, self.batch, cache, self.scoring, heads=heads, sinks=self.sinks
        )
        return out

    def run(self, qkv: Tensor, cache: CacheLayer) -> Tensor:
        """Results replace the queries in `qkv`."""
        self.attention.attend(
            qkv,
            self.batch,
            cache,
            self.scoring,
            norms=self.norms,
            smoothing=self.smoothing,
            sinks=self.sinks,
            to=None,
        )
        return qkv[:, : self.q_heads * self.cache_dim]

    @property
    def cache_dim(self) -> int:
        return self.qkv.shape[1] // (self.q_heads + 2 * KV_HEADS)


def make_case(
    gpu: Gpu,
    rng: torch.Generator,
    pasts: list[int],
    name: str,
    *,
    d: int,
    half: int,
    group: int = 4,
    scoring: Scoring | None = None,
    has_norms: bool = True,
    is_fitted: bool = False,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Case:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=DEVICE)

    rows, q_heads = len(pasts), group * KV_HEADS
    counts = [past // PAGE_SIZE + 1 for past in pasts]
    order = torch.randperm(sum(counts), generator=rng, device=DEVICE).int().cpu()
    page_table = torch.zeros(rows, max(counts), dtype=torch.int32)
    used = 0
    for seq, count in enumerate(counts):
        page_table[seq, :count] = order[used : used + count]
        used += count
    caches = [
        encode_rows(normal(sum(counts), KV_HEADS, PAGE_SIZE, d), kind) for kind in FORMATS[name]
    ]
    past_lens = torch.tensor(pasts, dtype=torch.int32)
    last_pages = page_table[torch.arange(rows), past_lens.long() // PAGE_SIZE].long()
    attention, starts = Attention(gpu), torch.arange(rows + 1, dtype=torch.int32)
    angle = 100 * normal(rows, half)
    batch = attention.bind(
        AttentionRows(page_table, starts, past_lens),
        last_pages * PAGE_SIZE + past_lens % PAGE_SIZE,
        angle.cos().cpu(),
        angle.sin().cpu(),
    )
    fit = normal(2, (q_heads + KV_HEADS) * d)
    norms = [0.5 + normal(d).abs() if has_norms else None for _ in range(2)]
    return Case(
        attention,
        batch,
        CacheLayer(*caches),
        normal(rows, (q_heads + 2 * KV_HEADS) * d).to(dtype),
        q_heads,
        scoring or Scoring(d**-0.5),
        HeadNorms(norms[0], norms[1], 1e-5),
        KeySmoothing(fit[0].contiguous(), fit[1].contiguous()) if is_fitted else None,
        normal(q_heads) if has_sinks else None,
    )


def assert_same(case: Case) -> None:
    apart, together = case.copied(), case.copied()
    expected = case.run_apart(apart)
    qkv = case.qkv.clone()
    keys = qkv[:, expected.shape[1] :].clone()
    for _ in range(2):  # the second time over a cache that has the new rows already
        qkv.copy_(case.qkv)
        got = case.run(qkv, together)
        assert not got.isnan().any()
        assert torch.equal(got, expected)
        for ours, theirs in ((together.keys, apart.keys), (together.values, apart.values)):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    values = keys.shape[1] // 2
    assert torch.equal(qkv[:, expected.shape[1] + values :], keys[:, values:])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d", [64, 128, 256, 96])  # 96: two launches
@pytest.mark.parametrize("count", [1, 3, 10])  # more than 8 rows have no warm-up pass
def test_results_and_cache_have_the_bits_of_two_launches(
    gpu: Gpu, rng: torch.Generator, name: str, d: int, count: int
) -> None:
    for first in range(0, len(PASTS), count):
        assert_same(make_case(gpu, rng, PASTS[first : first + count], name, d=d, half=d // 2))


@pytest.mark.parametrize(
    ("d", "half"), [(64, 0), (64, 8), (128, 32), (128, 16), (128, 0), (256, 32), (256, 64), (64, 7)]
)
@pytest.mark.parametrize("name", ["f16", "q4"])
def test_rope_may_rotate_a_part_of_a_head(
    gpu: Gpu, rng: torch.Generator, name: str, d: int, half: int
) -> None:
    assert_same(make_case(gpu, rng, [3, 40, 900], name, d=d, half=half, has_norms=False))


@pytest.mark.parametrize("name", ["f16", "fp8", "q6"])
@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_smoothing_sinks_windows_and_groups(
    gpu: Gpu, rng: torch.Generator, name: str, group: int, dtype: torch.dtype
) -> None:
    for scoring in (Scoring(0.1), Scoring(0.1, 50, 20.0), Scoring(0.1, 600)):
        for has_more in (False, True):
            more = {"is_fitted": has_more, "has_sinks": has_more, "has_norms": has_more}
            case = make_case(
                gpu,
                rng,
                PASTS[-4:],
                name,
                d=128,
                half=64,
                group=group,
                scoring=scoring,
                dtype=dtype,
                **more,
            )
            assert_same(case)


@pytest.mark.parametrize("name", ["f16", "q8", "q4"])
def test_passes_of_a_captured_graph_see_earlier_rows(
    gpu: Gpu, rng: torch.Generator, name: str
) -> None:
    """Each replay is one more token of every sequence. The rows come from the kernel before."""
    case = make_case(gpu, rng, [30, 250, 1], name, d=128, half=64)
    steps = 40
    pages = case.batch.rows.page_table.long()
    rows = torch.randn(steps, *case.qkv.shape, generator=rng, device=DEVICE).half()
    pasts = torch.tensor([[0], [100], [20]], device=DEVICE) + torch.arange(steps, device=DEVICE)
    pasts = torch.minimum(pasts, torch.tensor([[63], [255], [63]], device=DEVICE)).int()
    slots = pages.gather(1, pasts.long() // PAGE_SIZE) * PAGE_SIZE + pasts % PAGE_SIZE
    apart, together = case.copied(), case.copied()
    qkv = case.qkv.clone()

    def set_step(step: int) -> None:
        qkv.copy_(rows[step])
        case.qkv.copy_(rows[step])
        case.batch.rows.past_lens.copy_(pasts[:, step])
        case.batch.slots.copy_(slots[:, step])

    set_step(0)
    case.run(qkv, case.copied())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(qkv, together)
    for step in range(steps):
        set_step(step)
        expected = case.run_apart(apart)
        graph.replay()
        assert torch.equal(qkv[:, : expected.shape[1]], expected)
