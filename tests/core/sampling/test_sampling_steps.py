"""Each step against its formula in float64, and what it promises at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import steps_for
from exl_core.sampling.steps import (
    Ban,
    LogitStep,
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    draw,
    weights,
)

STEPS: list[LogitStep] = [
    RepetitionPenalty(1.3, (0, 5, 5, 31)),
    Ban(frozenset({3, 4})),
    Temperature(0.6),
    TopK(7),
    TopP(0.8),
    MinP(0.1),
]


def random_logits(seed: int, count: int = 64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: Tensor) -> set[int]:
    return set((logits > -math.inf).nonzero().flatten().tolist())


def probabilities(logits: Tensor) -> list[float]:
    exact = logits.double()
    return (exact - exact.logsumexp(0)).exp().tolist()


@pytest.mark.parametrize("step", STEPS, ids=lambda s: type(s).__name__)
def test_steps_are_values_and_leave_their_input_alone(step: LogitStep) -> None:
    logits = random_logits(1)
    before = logits.clone()
    after = step(logits)
    assert torch.equal(logits, before)
    assert after.dtype == torch.float32
    assert after.shape == logits.shape
    assert step == eval(repr(step), dict(globals()))


@pytest.mark.parametrize("seed", range(5))
def test_repetition_penalty(seed: int) -> None:
    logits = random_logits(seed)
    after = RepetitionPenalty(1.7, (2, 2, 9, 60))(logits)
    for i, (was, now) in enumerate(zip(logits.tolist(), after.tolist(), strict=True)):
        wanted = (was / 1.7 if was > 0 else was * 1.7) if i in (2, 9, 60) else was
        assert now == pytest.approx(wanted, rel=2e-7)


@pytest.mark.parametrize("temperature", [0.01, 0.5, 2.0, 100.0])
def test_temperature(temperature: float) -> None:
    logits = random_logits(2)
    exact = torch.softmax(logits.double() / temperature, 0)
    got = torch.softmax(Temperature(temperature)(logits).double(), 0)
    # One rounding of the difference and one of the quotient, both relative to what is divided.
    slack = float((logits.max() - logits.min()) / temperature) * 2**-23
    assert torch.allclose(got, exact, rtol=slack, atol=1e-30)


def test_temperature_does_not_overflow() -> None:
    after = Temperature(0.01)(torch.tensor([3e38, -3e38, 0.0]))
    assert after.tolist() == [0.0, -math.inf, -math.inf]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("p", [0.01, 0.3, 0.7, 0.95, 0.999])
def test_top_p_keeps_the_shortest_prefix_that_reaches_p(seed: int, p: float) -> None:
    logits = random_logits(seed)
    probability = probabilities(logits)
    order = sorted(range(64), key=lambda i: -probability[i])
    prefix: list[int] = []
    while sum(probability[i] for i in prefix) < p:  # crossing token included
        prefix.append(order[len(prefix)])
    assert kept(TopP(p)(logits)) == set(prefix)


def test_top_p_is_a_prefix_even_where_smaller_tokens_would_fit() -> None:
    logits = torch.tensor([0.40, 0.30, 0.22, 0.05, 0.03]).log()
    assert kept(TopP(0.5)(logits)) == {0, 1}
    assert kept(TopP(0.35)(logits)) == {0}
    assert kept(TopP(1e-12)(logits)) == {0}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("p", [1e-4, 0.05, 0.5, 1.0])
def test_min_p_is_relative_to_the_likeliest(seed: int, p: float) -> None:
    logits = random_logits(seed)
    probability = probabilities(logits)
    wanted = {i for i in range(64) if probability[i] >= p * max(probability)}
    assert kept(MinP(p)(logits)) == wanted


@pytest.mark.parametrize("k", [1, 5, 63, 64, 100])
def test_top_k_keeps_the_k_largest(k: int) -> None:
    logits = random_logits(3)
    order = sorted(range(64), key=lambda i: -float(logits[i]))
    assert kept(TopK(k)(logits)) == set(order[:k])


def test_ties_go_to_the_lowest_ids() -> None:
    flat = torch.zeros(1000)
    assert kept(TopK(10)(flat)) == set(range(10))
    assert kept(TopP(0.25)(flat)) == set(range(250))
    two_levels = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    assert kept(TopK(3)(two_levels)) == {1, 3, 0}


def test_dropped_tokens_stay_dropped() -> None:
    logits = random_logits(4)
    logits[:60] = -math.inf
    for step in STEPS[2:]:
        assert kept(step(logits)) <= {60, 61, 62, 63}


def test_the_order_of_the_chain_is_the_documented_one() -> None:
    params = SamplerParams(0.7, 40, 0.9, 0.05, 1.1, repetition_range=2)
    assert steps_for(params, [5, 6, 7]) == [
        RepetitionPenalty(1.1, (6, 7)),
        Temperature(0.7),
        TopK(40),
        TopP(0.9),
        MinP(0.05),
    ]
    assert steps_for(SamplerParams(), [1]) == []


@pytest.mark.parametrize("count", [1, 3, 511, 512, 513, 1024, 1500, 5000])
def test_draw_finds_where_the_running_sum_passes(count: int) -> None:
    weight = weights(random_logits(count, count), torch.zeros(()))
    running = weight.double().cumsum(0)
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
