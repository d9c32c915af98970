"""Drawing tokens on a GPU: the very tokens of the float64 reference, for every row of a batch."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.sampling import Capacity, RowSampler, SampleBuffers
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.backends.reference.sampling import ReferenceSamplingOps
from exl_core.ops.sampling import NOTHING_SAMPLED, NextStep, RowSettings, Sampled
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

UNIFORMS = (0.0, 0.31, 0.77, 0.999)
CHAINS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.01},
    "hot": {"temperature": 100.0, "top_p": 0.9},
    "greedy": {"top_k": 1},
    "top-k": {"top_k": 40},
    "wide top-k": {"top_k": 700, "temperature": 0.7},
    "wide top-k, top-p": {"top_k": 700, "top_p": 0.9, "min_p": 0.001},
    "all of top-k": {"top_k": 10**12, "top_p": 0.5},
    "top-p": {"top_p": 0.95},
    "narrow": {"top_p": 1e-9},
    "wide": {"top_p": 0.999999},
    "min-p": {"min_p": 0.05},
    "only the best": {"min_p": 1.0},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top-p, min-p": {"temperature": 1.3, "top_p": 0.7, "min_p": 0.3},
}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def sampler(gpu: Gpu) -> RowSampler:
    return RowSampler(gpu)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20)


def rows_of(rng: torch.Generator, vocab: int) -> dict[str, Tensor]:
    noise = torch.randn(vocab, generator=rng)
    peaked = noise - 8
    peaked[torch.randperm(vocab, generator=rng)[:30]] += 9
    dropped = noise.clone()
    dropped[torch.rand(vocab, generator=rng) < 0.7] = -math.inf
    dropped[vocab // 2] = 0.5
    steep = torch.linspace(0, -200, vocab)
    return {
        "flat": torch.zeros(vocab),
        "narrow": noise * 0.02 + 50,
        "broad": noise * 3,
        "sharp": noise * 30 - 1000,
        "peaked": peaked,
        "levels": (noise * 4).round() / 4,
        "dropped": dropped,
        "signed zeros": torch.where(noise > 0, 0.0, -0.0),
        "steep": steep[torch.randperm(vocab, generator=rng)],
    }


def random_mask(rng: torch.Generator, vocab: int) -> Tensor:
    words = torch.randint(-(2**31), 2**31, (-(-vocab // 32),), generator=rng).int()
    words[vocab // 64] |= 1 << (vocab // 2 % 31)
    return words


def reference(logits: Tensor, rows: list[RowSettings]) -> list[Sampled]:
    return [row.draw(ReferenceSamplingOps.sample, logits[row.row]) for row in rows]


def assert_same(got: list[Sampled], wanted: list[Sampled], hint: object) -> None:
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.token_id == other.token_id, (i, one, other, hint)
        assert one.probability == pytest.approx(other.probability, rel=1e-5), (i, hint)
        assert [j for j, _ in one.top] == [j for j, _ in other.top], (i, one, other, hint)
        shares = [p for _, p in other.top]
        assert [p for _, p in one.top] == pytest.approx(shares, rel=1e-5, abs=1e-37), (i, hint)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("vocab", [1, 5, 65, 257, 2100, 5003])
def test_every_row_gets_the_token_of_the_reference(
    sampler: RowSampler, random: torch.Generator, vocab: int, chain: dict[str, float]
) -> None:
    logits = torch.stack(list(rows_of(random, vocab).values()))
    settings = []
    for row, uniform in product(range(len(logits)), UNIFORMS):
        mask = random_mask(random, vocab) if vocab > 1 and row % 2 == 0 else None
        ids = torch.randint(0, vocab, (7,), generator=random)
        values = torch.randn(7, generator=random) * 3
        values[3] = -math.inf
        edits = (ids, values) if uniform > 0.5 else (None, None)
        settings.append(
            RowSettings(
                row, uniform=uniform, num_top=4, mask=mask, ids=edits[0], values=edits[1]
            )._replace(**chain)  # type: ignore[arg-type]
        )
    on_device = logits.cuda()
    got = sampler.draw(on_device, settings)
    assert_same(got, reference(logits, settings), chain)
    assert torch.equal(on_device.cpu(), logits)
    assert sampler.draw(on_device, settings) == got


@pytest.mark.parametrize("vocab", [49152, 128256, 262144])
def test_large_vocabularies_with_other_settings_in_each_row(
    sampler: RowSampler, random: torch.Generator, vocab: int
) -> None:
    rows = rows_of(random, vocab)
    logits = torch.stack(list(rows.values()))
    wide = torch.full((len(logits), vocab + 7), math.nan)
    wide[:, :vocab] = logits  # rows that no vector load may read at once, and poison behind them
    mask = random_mask(random, vocab)
    settings = []
    for i, (row, chain) in enumerate(product(range(len(logits)), CHAINS.values())):
        settings.append(
            RowSettings(
                row,
                uniform=float(torch.rand((), generator=random, dtype=torch.float64)),
                num_top=i % 4 * 5,
                mask=mask if i % 3 == 0 else None,
            )._replace(**chain)  # type: ignore[arg-type]
        )
    wanted = reference(logits, settings)
    assert_same(sampler.draw(logits.cuda(), settings), wanted, list(rows))
    assert_same(sampler.draw(wide.cuda()[:, :vocab], settings), wanted, list(rows))


def test_the_tokens_at_the_borders_are_the_documented_ones(sampler: RowSampler) -> None:
    def kept(row: Tensor, **settings: float) -> list[int]:
        wanted = RowSettings(0, num_top=9)._replace(**settings)  # type: ignore[arg-type]
        return [i for i, _ in sampler.draw(row.cuda()[None], [wanted])[0].top]

    row = torch.tensor([0.05, 0.40, 0.22, 0.30, 0.03], dtype=torch.float64).log().float()
    assert kept(row) == [1, 3, 2, 0, 4]
    assert kept(row, top_p=0.5) == [1]
    assert kept(row, top_p=0.72) == [1, 3]
    assert kept(row, top_p=0.01) == [1]
    assert kept(row, min_p=0.54) == [1, 3, 2]
    assert kept(row, top_k=2) == [1, 3]
    assert kept(row, top_k=3, top_p=0.5) == [1]
    assert kept(torch.zeros(1000), top_p=0.004) == [0, 1, 2, 3]
    assert kept(torch.zeros(1000), top_k=3) == [0, 1, 2]
    rare = torch.tensor([0.6, 0.4 - 3e-6, 2e-6, 9e-7, 1e-7], dtype=torch.float64).log().float()
    assert kept(rare, top_p=0.9999999) == [0, 1, 2]


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_a_flat_nucleus_ends_by_id(sampler: RowSampler, share: float) -> None:
    vocab = 100_000
    wanted = RowSettings(0, top_p=share, uniform=1 - 2**-53, num_top=512)
    drawn = sampler.draw(torch.zeros(1, vocab).cuda(), [wanted])[0]
    assert drawn.token_id == math.floor(share * vocab) - 1
    assert [i for i, _ in drawn.top] == list(range(512))


def test_the_last_of_equal_ids_counts_and_the_mask_is_above_edits(sampler: RowSampler) -> None:
    vocab = 3000
    ids = torch.arange(600).repeat(3)  # each three times
    values = torch.arange(1800, dtype=torch.float32)
    row = RowSettings(0, top_k=1, ids=ids, values=values)
    logits = torch.zeros(1, vocab).cuda()
    assert sampler.draw(logits, [row])[0].token_id == 599
    values[1799] = -5.0
    assert sampler.draw(logits, [row])[0].token_id == 598
    mask = torch.full((94,), -1, dtype=torch.int32)
    mask[598 // 32] &= ~(1 << 598 % 32)
    assert sampler.draw(logits, [row._replace(mask=mask)])[0].token_id == 597


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_not_drawn_from(sampler: RowSampler, value: float) -> None:
    vocab = 2500
    places = (0, 63, 64, 2047, 2048, 2499)
    logits = torch.zeros(len(places) + 1, vocab)
    mask = torch.full((79,), -1, dtype=torch.int32)
    for i, place in enumerate(places):
        logits[i, place] = value
    for chain in CHAINS.values():
        for bits in (None, mask):
            rows = [
                RowSettings(i, num_top=3, mask=bits)._replace(**chain)  # type: ignore[arg-type]
                for i in range(len(places) + 1)
            ]
            got = sampler.draw(logits.cuda(), rows)
            assert got[:-1] == [NOTHING_SAMPLED] * len(places)
            assert got[-1].token_id == 0
            edits = torch.tensor([70]), torch.tensor([value])
            edited = rows[-1]._replace(ids=edits[0], values=edits[1])
            assert sampler.draw(logits.cuda(), [edited]) == [NOTHING_SAMPLED]
        mask[:] = -1


def test_without_a_token_nothing_is_drawn(sampler: RowSampler) -> None:
    nothing = torch.full((1, 700), -math.inf).cuda()
    closed = torch.zeros(22, dtype=torch.int32)
    for chain in CHAINS.values():
        row = RowSettings(0, num_top=2)._replace(**chain)  # type: ignore[arg-type]
        assert sampler.draw(nothing, [row]) == [NOTHING_SAMPLED]
        masked = row._replace(mask=closed)
        assert sampler.draw(torch.zeros(1, 700).cuda(), [masked]) == [NOTHING_SAMPLED]


@pytest.mark.parametrize("chain", ["plain", "hot", "top-p", "min-p", "usual"])
def test_tokens_come_as_often_as_they_are_likely(
    sampler: RowSampler, random: torch.Generator, chain: str
) -> None:
    vocab, calls, batch = 128256, 40, 250
    logits = torch.randn(vocab, generator=random) * 3
    on_device = logits.cuda()[None]
    settings = RowSettings(0)._replace(**CHAINS[chain])  # type: ignore[arg-type]
    classes: Counter[int] = Counter()
    for _ in range(calls):
        uniforms = torch.rand(batch, generator=random, dtype=torch.float64).tolist()
        rows = [settings._replace(uniform=uniform) for uniform in uniforms]
        classes.update(drawn.token_id * 5 // vocab for drawn in sampler.draw(on_device, rows))
    everything = settings._replace(num_top=vocab).draw(ReferenceSamplingOps.sample, logits).top
    shares = [0.0] * 5
    for token_id, p in everything:
        shares[token_id * 5 // vocab] += p
    draws = calls * batch
    for i, share in enumerate(shares):
        error = math.sqrt(max(share * (1 - share), 1e-9) / draws)
        assert abs(classes[i] / draws - share) < 5 * error, (i, share, classes)


def test_tokens_go_on_before_anybody_waits(sampler: RowSampler, random: torch.Generator) -> None:
    logits = torch.randn(5, 5003, generator=random) * 3
    logits[3] = math.nan
    rows = [RowSettings(i, uniform=0.2 * i)._replace(top_k=i % 3) for i in (4, 3, 0, 2)]
    next_ids = torch.full((6,), -7, device="cuda")
    behind = []
    next_step = NextStep(next_ids[1:5], lambda: behind.append(next_ids.clone()))
    drawn = [one.token_id for one in sampler.draw(logits.cuda(), rows, next_step)]
    assert drawn == [one.token_id for one in reference(logits, rows)]
    assert drawn[1] == -1
    assert [one.tolist() for one in behind] == [[-7, drawn[0], 0, *drawn[2:], -7]]


def test_tokens_that_the_host_draws_go_on_as_well() -> None:
    table = CudaTable(torch.device("cuda", 0), threads=1)
    logits = torch.randn(2, 5003, generator=torch.Generator().manual_seed(3)).cuda()
    rows = [RowSettings(0, num_top=cuda.MAX_TOP + 1), RowSettings(1, uniform=0.7)]
    next_ids = torch.zeros(2, dtype=torch.int64, device="cuda")
    behind = []
    drawn = table.sample_rows(
        logits, rows, NextStep(next_ids, lambda: behind.append(next_ids.tolist()))
    )
    assert behind == [[one.token_id for one in drawn]]


def test_a_captured_graph_draws_by_what_was_filled_in_later(
    gpu: Gpu, random: torch.Generator
) -> None:
    vocab = 30_000
    logits = torch.randn(4, vocab, generator=random) * 3
    on_device = logits.cuda()
    buffers = SampleBuffers(gpu, Capacity(4, 16, 0, 5), vocab)
    rows = [RowSettings(i, num_top=5) for i in range(4)]
    buffers.fill(rows)
    gpu.workspace("sample", 4, vocab)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.enqueue(on_device, 4)
    for chain in CHAINS.values():
        rows = [
            RowSettings(i, uniform=0.2 * i + 0.05, num_top=5)._replace(**chain)  # type: ignore[arg-type]
            for i in (2, 0, 1, 3)
        ]
        rows[1] = rows[1]._replace(ids=torch.tensor([5, 9]), values=torch.tensor([4.0, -math.inf]))
        buffers.fill(rows)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(buffers.read(rows), reference(logits, rows), chain)


def test_sizes_outside_the_contract_are_refused(gpu: Gpu, sampler: RowSampler) -> None:
    with pytest.raises(cuda.CudaError, match="InvalidValue"):
        sampler.draw(torch.zeros(1, 262145).cuda(), [RowSettings(0)])
    with pytest.raises(cuda.CudaError, match="InvalidValue"):
        RowSampler(gpu).draw(torch.zeros(1, 9000).cuda(), [RowSettings(0, num_top=513)])
