"""The sampler: equal to its steps, right in its frequencies, its own in its randomness."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_core.sampling import fuse
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError, Sampler, steps_for
from exl_core.sampling.steps import draw, weights

CHAINS = [
    SamplerParams(),
    SamplerParams(temperature=0.7),
    SamplerParams(top_k=40),
    SamplerParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    SamplerParams(top_p=0.3),
    SamplerParams(top_p=0.95),
    SamplerParams(top_p=0.9999),
    SamplerParams(temperature=1.7, top_p=0.99, min_p=0.001),
    SamplerParams(min_p=0.05),
    SamplerParams(temperature=0.6, top_k=3000, top_p=0.5),
    SamplerParams(top_k=10**9, top_p=0.8),
    SamplerParams(temperature=0.9, top_k=20, repetition_penalty=1.3, repetition_range=3),
    SamplerParams(temperature=0, repetition_penalty=1.5),
]


def random_logits(seed: int, count: int, spread: float) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * spread


def kept_by_steps(params: SamplerParams, logits: Tensor, history: list[int]) -> Tensor:
    for step in steps_for(params, history):
        logits = step(logits)
    return weights(logits, logits.amax())


def kept_by_shortlist(params: SamplerParams, logits: Tensor) -> Tensor:
    """Weights over the vocabulary of the fused chain, for logits after temperature."""
    ids, weight = fuse.shortlist(
        logits, logits.amax(), top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    if ids is None:
        return weight
    assert torch.equal(ids, ids.unique()), "ids ascend"
    return torch.zeros(len(logits)).index_put_((ids,), weight)


@pytest.mark.parametrize("count", [50, 257, 5000, 30_000])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0], ids="spread{}".format)
@pytest.mark.parametrize("params", CHAINS, ids=lambda p: f"chain{CHAINS.index(p)}")
def test_the_fused_chain_draws_what_the_steps_draw(
    params: SamplerParams, spread: float, count: int
) -> None:
    history = [1, 5, 7, 11, 5]
    for seed in range(3):
        logits = random_logits(seed, count, spread)
        sampler = Sampler(replace(params, seed=seed))
        expected = kept_by_steps(params, logits, history)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(4):
            token = sampler.sample(logits, history)
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            assert token == draw(expected, uniform)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from([2, 30, 256, 257, 700, 3000]),
    spread=st.sampled_from([0.0, 0.02, 0.5, 2.0, 6.0, 30.0]),
    levels=st.sampled_from([None, 1, 4]),
    dropped=st.sampled_from([0.0, 0.5, 0.99]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 255, 256, 700]),
    top_p=st.sampled_from([1.0, 0.999999, 0.99, 0.8, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
)
def test_the_fused_chain_keeps_exactly_what_the_steps_keep(
    *,
    seed: int,
    count: int,
    spread: float,
    levels: int | None,
    dropped: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """Ties (`levels` distinct values per unit) and dropped tokens included."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=generator) * spread
    if levels is not None:
        logits = (logits * levels).round() / levels
    is_dropped = torch.rand(count, generator=generator) < dropped
    is_dropped[seed % count] = False
    logits[is_dropped] = -math.inf
    params = SamplerParams(top_k=top_k, top_p=top_p, min_p=min_p)
    expected = logits.clone()
    for step in steps_for(params, []):
        expected = step(expected)
    got = kept_by_shortlist(params, logits)
    # Vectorized exponentials may differ by a rounding between a long row and a short one.
    assert torch.allclose(got, weights(expected, expected.amax()), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("params", CHAINS[:9], ids=lambda p: f"chain{CHAINS.index(p)}")
def test_frequencies_are_the_distribution_within_their_standard_error(
    params: SamplerParams,
) -> None:
    logits = random_logits(11, 30, 1.5)
    draws = 4000
    sampler = Sampler(replace(params, seed=99))
    counts = Counter(sampler.sample(logits, []) for _ in range(draws))
    weight = kept_by_steps(params, logits, []).double()
    for token, p in enumerate((weight / weight.sum()).tolist()):
        error = math.sqrt(p * (1 - p) / draws)
        assert abs(counts[token] / draws - p) <= 4.5 * error, f"token {token}"
        assert p > 0 or counts[token] == 0


def test_frequencies_hold_over_a_large_vocabulary() -> None:
    """Thirds of a flat distribution of 200000: no part of it is out of the draw's reach."""
    logits = torch.zeros(200_000)
    sampler = Sampler(SamplerParams(seed=5))
    draws = 300
    thirds = Counter(sampler.sample(logits, []) * 3 // 200_000 for _ in range(draws))
    for third in range(3):
        assert abs(thirds[third] / draws - 1 / 3) < 4 * math.sqrt(2 / 9 / draws)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = random_logits(3, 1000, 2.0)

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplerParams(seed=seed))
        return [sampler.sample(logits, []) for _ in range(30)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_the_global_random_stream_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Sampler(SamplerParams()).sample(torch.zeros(100), [])
    assert torch.equal(torch.rand(3), expected)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert Sampler(SamplerParams(temperature=0)).sample(logits, []) == 1
    assert Sampler(SamplerParams(top_k=1)).sample(logits, []) == 1


def test_the_penalty_reaches_as_far_as_its_range() -> None:
    logits = torch.tensor([3.0, 2.9, 2.8, -9.0])
    history = [0, 1, 2, 3]

    def token(count: int | None) -> int:
        params = SamplerParams(temperature=0, repetition_penalty=2.0, repetition_range=count)
        return Sampler(params).sample(logits, history)

    assert [token(n) for n in (1, 2, 3, 4, 9, None)] == [0, 0, 0, 0, 0, 0]
    logits = torch.tensor([3.0, 2.9, 1.4, -9.0])
    assert [token(n) for n in (3, 4, None)] == [0, 0, 0]
    assert Sampler(SamplerParams(temperature=0, repetition_penalty=3.0)).sample(logits, [0]) == 1


def test_the_penalty_follows_a_growing_history() -> None:
    params = SamplerParams(temperature=0, repetition_penalty=100.0)
    sampler = Sampler(params)
    logits = torch.arange(1000, 0, -1).float()
    history: list[int] = []
    for _ in range(700):  # longer than the buffer at first
        history.append(sampler.sample(logits, history))
    assert history == list(range(700))


def test_input_logits_are_left_alone() -> None:
    logits = random_logits(2, 500, 2.0)
    before = logits.clone()
    for params in CHAINS:
        Sampler(params).sample(logits, [1, 2], frozenset({3}))
    assert torch.equal(logits, before)


def test_banned_tokens_do_not_come() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0])
    assert Sampler(SamplerParams(temperature=0)).sample(logits, [], frozenset({0})) == 1
    sampler = Sampler(SamplerParams(seed=1))
    assert {sampler.sample(logits, [], frozenset({0, 1})) for _ in range(50)} == {2}


@pytest.mark.parametrize("params", [SamplerParams(), SamplerParams(temperature=0)])
def test_nothing_left_to_sample_is_an_error(params: SamplerParams) -> None:
    with pytest.raises(LogitsError, match="leaves no token"):
        Sampler(params).sample(torch.zeros(3), [], frozenset({0, 1, 2}))


@pytest.mark.parametrize("params", [SamplerParams(temperature=0), SamplerParams(top_k=5)])
@pytest.mark.parametrize("place", [0, 17, 29_000])
@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_logits_that_are_no_numbers_are_an_error_with_a_cause(
    params: SamplerParams, place: int, value: float, name: str
) -> None:
    logits = torch.zeros(30_000)
    logits[place] = value
    with pytest.raises(LogitsError, match=name) as caught:
        Sampler(params).sample(logits, [])
    assert "exl doctor" in (caught.value.next_step or "")


def test_a_token_that_the_model_rules_out_is_no_error_unless_it_is_every_token() -> None:
    logits = torch.tensor([-math.inf, 0.0])
    assert Sampler(SamplerParams()).sample(logits, []) == 1
    with pytest.raises(LogitsError, match="minus infinity everywhere"):
        Sampler(SamplerParams()).sample(torch.full((4,), -math.inf), [])
