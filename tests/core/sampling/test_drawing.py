"""Sampling from a distribution: selected index, frequencies, and verification of drafts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exl_core.ops.open import get_table
from exl_core.sampling.chain import steps_for
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler
from exl_core.sampling.steps import draw, skewed, softmax, weights
from support.profiles import first_by_default

OPS = get_table("cpu", threads=1)
DRAWS = first_by_default([1000, 4000])


def random_logits(seed: int, count: int = 64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("count", [1, 3, 511, 512, 513, 1024, 1500, 5000])
def test_draw_returns_the_index_where_the_running_sum_passes(count: int) -> None:
    weight = weights(random_logits(count, count))
    running = weight.cumsum(0)
    generator = torch.Generator().manual_seed(count)
    for uniform in [0.0, 1 - 2**-53, *torch.rand(200, generator=generator).tolist()]:
        index = draw(weight, uniform)
        target = uniform * float(running[-1])
        dust = 1e-12 * float(running[-1])
        assert float(running[index]) >= target - dust
        assert index == 0 or float(running[index - 1]) <= target + dust


@pytest.mark.parametrize("count", [40, 3000])
def test_draw_never_takes_a_token_of_weight_zero(count: int) -> None:
    weight = torch.zeros(count)
    weight[[7, 23]] = torch.tensor([1.0, 3.0])
    uniforms = [0.0, 0.1, 0.2499999, 0.25, 0.9, 1 - 2**-53]
    assert [draw(weight, u) for u in uniforms] == [7, 7, 7, 23, 23, 23]


def test_skew_transforms_the_random_number() -> None:
    assert skewed(0.3, 0.0) == pytest.approx(0.3)
    assert skewed(0.25, math.log(2)) == pytest.approx(0.5)
    assert skewed(0.5, -math.log(2)) == pytest.approx(0.25)
    assert skewed(0.0, 3.0) == 0.0
    assert skewed(0.9, 20.0) < 1.0


CHAINS = [
    SamplerParams(),
    SamplerParams(temperature=0.7),
    SamplerParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
    SamplerParams(top_p=0.6),
    SamplerParams(typical=0.8),
    SamplerParams(xtc_probability=0.5, xtc_threshold=0.05),
    SamplerParams(temperature=0.5, temperature_last=True, min_p=0.1),
    SamplerParams(mirostat_tau=1.5),
]


def distribution(params: SamplerParams, logits: Tensor) -> Tensor:
    for step in steps_for(params, []):
        logits = step(logits)
    return softmax(logits)


def assert_frequencies(counts: Counter[int], p: Tensor) -> None:
    """Check each frequency against its standard error, and all of them by chi-square.

    The chi-square bound is a normal approximation at 5 sigma. Tokens with a small expected count
    are merged into one class.
    """
    draws = sum(counts.values())
    chi, freedom, rare, rare_p = 0.0, -1, 0, 0.0
    for token, probability in enumerate(p.tolist()):
        error = math.sqrt(probability * (1 - probability) / draws)
        assert abs(counts[token] / draws - probability) <= 4.5 * error + 3 / draws, f"{token}"
        assert probability > 0 or counts[token] == 0
        if probability * draws < 5:
            rare, rare_p = rare + counts[token], rare_p + probability
        else:
            chi += (counts[token] - draws * probability) ** 2 / (draws * probability)
            freedom += 1
    if rare_p * draws >= 5:
        chi += (rare - draws * rare_p) ** 2 / (draws * rare_p)
        freedom += 1
    assert chi <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("params", CHAINS, ids=lambda p: f"chain{CHAINS.index(p)}")
def test_frequencies_match_the_distribution_within_their_standard_error(
    params: SamplerParams, draws: int
) -> None:
    logits = random_logits(11, 30) / 2
    sampler = Sampler(replace(params, seed=99), OPS)
    counts = Counter(sampler.sample(logits, []).token_id for _ in range(draws))
    assert_frequencies(counts, distribution(params, logits))


def test_frequencies_hold_over_a_large_vocabulary() -> None:
    """Thirds of a flat distribution over 200000 tokens: every part can be sampled."""
    logits = torch.zeros(200_000)
    sampler = Sampler(SamplerParams(seed=5), OPS)
    draws = 300
    thirds = Counter(sampler.sample(logits, []).token_id * 3 // 200_000 for _ in range(draws))
    for third in range(3):
        assert abs(thirds[third] / draws - 1 / 3) < 4 * math.sqrt(2 / 9 / draws)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("skew", [-1.5, 0.4, 2.0])
def test_a_skewed_draw_orders_tokens_from_the_likeliest_down(skew: float, draws: int) -> None:
    p = [0.1, 0.5, 0.15, 0.25]
    sampler = Sampler(SamplerParams(skew=skew, seed=3), OPS)
    logits = torch.tensor(p).log()
    counts = Counter(sampler.sample(logits, []).token_id for _ in range(draws))
    # r' <= x where r <= x ** e^skew.
    edge = 0.0
    for token in (1, 3, 2, 0):
        share = min(edge + p[token], 1.0) ** math.exp(skew) - edge ** math.exp(skew)
        assert abs(counts[token] / draws - share) <= 4.5 * math.sqrt(share * (1 - share) / draws)
        assert float(sampler.probabilities(logits, [])[token]) == pytest.approx(share, abs=1e-6)
        edge += p[token]
    offer = torch.full((4,), 0.25)
    verified = Counter(
        sampler.verify(logits, [], turn % 4, offer).token_id for turn in range(draws)
    )
    assert_frequencies(verified, sampler.probabilities(logits, []))


OFFERS = {
    "the same": [0.30, 0.25, 0.2, 0.15, 0.1, 0.0],
    "flat": [1 / 6] * 6,
    "sure of one": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
    "only what cannot come": [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    "the other way": [0.0, 0.1, 0.15, 0.2, 0.25, 0.3],
    "narrower": [0.6, 0.4, 0.0, 0.0, 0.0, 0.0],
}
TARGET = [0.30, 0.25, 0.2, 0.15, 0.1, 0.0]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize(
    ("offer", "params"),
    [
        *((offer, SamplerParams()) for offer in OFFERS),
        ("flat", SamplerParams(top_k=3)),
        ("the other way", SamplerParams(temperature=0.6, typical=0.9)),
    ],
)
def test_verified_tokens_follow_the_target_distribution(
    offer: str, params: SamplerParams, draws: int
) -> None:
    logits, q = torch.tensor(TARGET).log(), torch.tensor(OFFERS[offer])
    sampler = Sampler(replace(params, seed=17), OPS)
    proposals = torch.Generator().manual_seed(4)
    p = distribution(params, logits)
    counts: Counter[int] = Counter()
    accepted = 0
    for proposal in torch.multinomial(q, draws, replacement=True, generator=proposals).tolist():
        sample = sampler.verify(logits, [], proposal, q, want_probability=True)
        counts[sample.token_id] += 1
        accepted += sample.token_id == proposal
        assert sample.probability == pytest.approx(float(p[sample.token_id]), rel=1e-6)
    assert_frequencies(counts, p)
    # The acceptance probability is the overlap of both distributions.
    share = float(torch.minimum(p, q.double()).sum())
    assert abs(accepted / draws - share) <= 4.5 * math.sqrt(share * (1 - share) / draws) + 1e-6


def test_a_rejected_proposal_is_never_the_result() -> None:
    logits = torch.tensor([0.1, 0.9]).log()
    sampler = Sampler(SamplerParams(seed=1), OPS)
    q = torch.tensor([1.0, 0.0])
    results = [sampler.verify(logits, [], 0, q).token_id for _ in range(200)]
    assert 0 < results.count(0) < 60
    nothing = torch.tensor([0.0, 1.0])
    assert sampler.verify(torch.tensor([0.0, -math.inf]), [], 1, nothing).token_id == 0


@pytest.mark.parametrize("params", CHAINS, ids=lambda p: f"chain{CHAINS.index(p)}")
@pytest.mark.parametrize("proposal", [0, 5, 9999])
def test_a_deterministic_proposal_changes_no_token(params: SamplerParams, proposal: int) -> None:
    plain, verifying = (Sampler(replace(params, seed=5), OPS) for _ in range(2))
    for seed in range(20):
        logits = random_logits(seed)
        wanted = plain.sample(logits, [], num_top=3, want_probability=True)
        got = verifying.verify(logits, [], proposal, None, num_top=3, want_probability=True)
        assert got == wanted


def test_a_greedy_target_accepts_its_own_token_only() -> None:
    logits, q = torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.3, 0.3, 0.4])
    sampler = Sampler(SamplerParams(temperature=0), OPS)
    assert [sampler.verify(logits, [], token, q).token_id for token in range(3)] == [1, 1, 1]


def test_proposals_from_another_vocabulary_size() -> None:
    """A draft model's vocabulary may be padded to another size."""
    logits = torch.tensor([0.5, 0.5]).log()
    sampler = Sampler(SamplerParams(seed=2), OPS)
    for q, proposal in (([1.0], 0), ([0.2, 0.2, 0.6], 2), ([0.0, 0.0, 1.0], 2)):
        counts = Counter(
            sampler.verify(logits, [], proposal, torch.tensor(q)).token_id for _ in range(400)
        )
        assert set(counts) == {0, 1}


def test_each_token_takes_one_random_number() -> None:
    logits, q = random_logits(1), torch.full((64,), 1 / 64)
    generator = torch.Generator().manual_seed(8)
    sampler = Sampler(SamplerParams(seed=8, top_k=20), OPS)
    p = distribution(SamplerParams(top_k=20), logits)
    for turn in range(60):
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        if turn % 3 == 0:
            sampler.verify(logits, [], turn, q)
        elif turn % 3 == 1:
            sampler.probabilities(logits, [])
            assert sampler.verify(logits, [], turn, None).token_id == draw(p, uniform)
        else:
            sampler.rewind(0)
            assert sampler.sample(logits, []).token_id == draw(p, uniform)
