"""Each sampling step, compared with its formula in float64, and its edge cases."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_core.sampling.chain import steps_for
from exl_core.sampling.feedback import Mirostat, SurpriseCut, ZipfCut
from exl_core.sampling.params import SamplerParams, TokenBias
from exl_core.sampling.penalties import Allow, Ban, Bias, Dry, Mask, Penalties
from exl_core.sampling.steps import (
    DynamicTemperature,
    ExcludeTop,
    LogitStep,
    MinP,
    Smoothing,
    TailFree,
    Temperature,
    TopA,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)
from support.profiles import examples

CUTS: list[LogitStep] = [
    TopK(7),
    TopP(0.8),
    TopA(0.3),
    TopNSigma(1.5),
    MinP(0.1),
    TailFree(0.9),
    Typical(0.7),
    SurpriseCut(3.0),
    ZipfCut(3.0),
    ExcludeTop(1.0, 0.05),
]
RESHAPING: list[LogitStep] = [
    Temperature(0.6),
    Smoothing(0.3),
    Smoothing(0.3, 2.0),
    DynamicTemperature(0.2, 2.0, 0.8),
    ExcludeTop(0.4, 0.05, frozenset({2})),
]
STEPS: list[LogitStep] = [
    Penalties((0, 5, 5, 31), 1.3),
    Ban(frozenset({3, 4})),
    Allow(frozenset(range(60))),
    Bias(TokenBias({5: 1.5, 7: -2.0})),
    Dry((1, 2, 3, 4, 1, 2, 3), 1.0),
    *RESHAPING,
    *CUTS,
]
RARE = [0.40, 0.30, 0.22, 0.05, 0.03]


def random_logits(seed: int, count: int = 64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3


def logits_of(*probability: float) -> Tensor:
    return torch.tensor(probability, dtype=torch.float64).log().float()


def kept(logits: Tensor) -> set[int]:
    return set((logits > -math.inf).nonzero().flatten().tolist())


def probabilities(logits: Tensor) -> list[float]:
    exact = logits.double()
    return (exact - exact.logsumexp(0)).exp().tolist()


def ordered(p: list[float]) -> list[int]:
    return sorted((i for i in range(len(p)) if p[i] > 0), key=lambda i: (-p[i], i))


@pytest.mark.parametrize("step", STEPS, ids=lambda s: type(s).__name__)
def test_steps_are_values_and_do_not_modify_their_input(step: LogitStep) -> None:
    logits = random_logits(1)
    before = logits.clone()
    after = step(logits)
    assert torch.equal(logits, before)
    assert after.dtype == torch.float32
    assert after.shape == logits.shape
    assert step == eval(repr(step), dict(globals()))
    assert len({step, eval(repr(step), dict(globals()))}) == 1
    # Even a step without effect returns a new tensor.
    alone = torch.full((64,), -math.inf)
    alone[63] = 1.0
    step(alone).zero_()
    assert alone[63] == 1.0


@pytest.mark.parametrize("temperature", [0.01, 0.5, 2.0, 100.0])
def test_temperature(temperature: float) -> None:
    logits = random_logits(2)
    exact = torch.softmax(logits.double() / temperature, 0)
    got = torch.softmax(Temperature(temperature)(logits).double(), 0)
    # One rounding of the difference and one of the quotient, both relative to the dividend.
    slack = float((logits.max() - logits.min()) / temperature) * 2**-23
    assert torch.allclose(got, exact, rtol=slack, atol=1e-30)


def test_temperature_does_not_overflow() -> None:
    after = Temperature(0.01)(torch.tensor([3e38, -3e38, 0.0]))
    assert after.tolist() == [0.0, -math.inf, -math.inf]


@pytest.mark.parametrize("factor", [0.01, 0.5, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_smoothing_is_quadratic_in_the_distance_from_the_largest(
    factor: float, temperature: float
) -> None:
    logits = random_logits(3)
    after = logits
    for step in steps_for(SamplerParams(smoothing_factor=factor, temperature=temperature), []):
        after = step(after)
    exact = logits.double()
    exponent = -factor * (exact - exact.max()) ** 2 / temperature
    # Four roundings (difference twice, for it is squared), product and quotient.
    assert torch.allclose(after.double() - after.max(), exponent, rtol=6 * 2**-24, atol=1e-12)
    alone = torch.tensor([-math.inf, 2.0])
    assert Smoothing(factor)(alone).tolist() == [-math.inf, 0.0]


@pytest.mark.parametrize("curve", [1.0, 1.5, 3.0, 7.0])
def test_smoothing_curve_mixes_square_and_cube(curve: float) -> None:
    logits = random_logits(4)
    logits[9] = -math.inf
    largest = max(logits.tolist())
    # text-generation-webui's formula in float64, one token at a time.
    k, s = (3 - curve) / 2, (curve - 1) / 2
    wanted = [-k * 0.4 * (x - largest) ** 2 + s * 0.4 * (x - largest) ** 3 for x in logits.tolist()]
    wanted[9] = -math.inf
    after = Smoothing(0.4, curve)(logits)
    assert after.tolist() == pytest.approx(wanted, rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("p", [0.01, 0.3, 0.7, 0.95, 0.999])
def test_top_p_keeps_the_longest_prefix_within_p(seed: int, p: float) -> None:
    logits = random_logits(seed)
    probability = probabilities(logits)
    order = ordered(probability)
    prefix = order[:1]
    while sum(probability[i] for i in order[: len(prefix) + 1]) <= p:
        prefix = order[: len(prefix) + 1]
    prefix = [i for i in prefix if probability[i] >= 1e-6 or i == order[0]]
    assert kept(TopP(p)(logits)) == set(prefix)


def test_top_p_is_a_prefix_even_if_smaller_tokens_would_fit() -> None:
    logits = logits_of(*RARE)
    assert kept(TopP(0.5)(logits)) == {0}
    assert kept(TopP(0.72)(logits)) == {0, 1}
    assert kept(TopP(0.35)(logits)) == {0}
    assert kept(TopP(1e-12)(logits)) == {0}
    assert kept(TopP(0.95)(logits_of(0.5, 0.3, 0.19, 0.01))) == {0, 1}


def test_top_p_drops_tokens_below_a_millionth() -> None:
    assert kept(TopP(0.9999999)(logits_of(0.6, 0.4 - 3e-6, 2e-6, 9e-7, 1e-7))) == {0, 1, 2}


def test_top_p_counts_ties_exactly() -> None:
    assert kept(TopP(0.25)(torch.zeros(1000))) == set(range(250))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("a", [1e-3, 0.2, 1.0])
def test_top_a_is_relative_to_the_square_of_the_largest(seed: int, a: float) -> None:
    logits = random_logits(seed)
    p = probabilities(logits)
    assert kept(TopA(a)(logits)) == {i for i in range(64) if p[i] >= a * max(p) ** 2}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("n", [0.3, 1.0, 3.0])
def test_top_n_sigma_counts_deviations_from_the_largest_logit(seed: int, n: float) -> None:
    logits = random_logits(seed)
    dropped = torch.tensor([3, 17, 40])
    logits[dropped] = -math.inf
    left = [float(x) for i, x in enumerate(logits) if i not in (3, 17, 40)]
    floor = max(left) - n * statistics.pstdev(left)
    wanted = {i for i in range(64) if float(logits[i]) >= floor}
    assert kept(TopNSigma(n)(logits)) == wanted
    assert kept(TopNSigma(n)(Temperature(0.25)(logits))) == wanted, "a temperature changes nothing"


def test_top_n_sigma_keeps_equal_logits() -> None:
    assert kept(TopNSigma(1.0)(torch.zeros(9))) == set(range(9))


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


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("z", [0.1, 0.5, 0.9, 0.99])
def test_tail_free_cuts_at_its_share_of_the_curvature(seed: int, z: float) -> None:
    logits = random_logits(seed)
    logits[40:] = -math.inf
    p = probabilities(logits)
    order = ordered(p)
    d = [abs(-p[order[i]] + 2 * p[order[i + 1]] - p[order[i + 2]]) for i in range(len(order) - 2)]
    k = next((i for i in range(len(d)) if sum(d[: i + 1]) / sum(d) > z), len(d))
    assert kept(TailFree(z)(logits)) == set(order[: k + 1])


def test_tail_free_keeps_two_tokens() -> None:
    assert kept(TailFree(0.01)(torch.tensor([1.0, -math.inf, -3.0]))) == {0, 2}
    assert kept(TailFree(0.5)(torch.zeros(5))) == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mass", [0.05, 0.4, 0.8, 0.99])
def test_typical_keeps_tokens_with_surprise_near_the_entropy(seed: int, mass: float) -> None:
    logits = random_logits(seed)
    logits[50:] = -math.inf
    p = probabilities(logits)
    order = ordered(p)
    entropy = -sum(p[i] * math.log(p[i]) for i in order)
    nearest = sorted(order, key=lambda i: abs(-math.log(p[i]) - entropy))
    wanted: list[int] = []
    while sum(p[i] for i in wanted) < mass:
        wanted.append(nearest[len(wanted)])
    assert kept(Typical(mass)(logits)) == set(wanted)


def test_typical_keeps_the_likeliest_token_if_it_is_typical() -> None:
    # H = 1.3376; by distance: 0.2, 0.15, 0.5, 0.1, 0.05, and 0.2 + 0.15 do not reach 0.6.
    assert kept(Typical(0.6)(logits_of(0.5, 0.2, 0.15, 0.1, 0.05))) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mu", [-3.0, 0.5, 2.0, 5.0, 100.0, 1000.0])
def test_the_surprise_cut(seed: int, mu: float) -> None:
    logits = random_logits(seed)
    p = probabilities(logits)
    wanted = {i for i in range(64) if -math.log2(p[i]) <= mu}
    assert kept(SurpriseCut(mu)(logits)) == (wanted or {p.index(max(p))})


def zipf_size(p: list[float], mu: float) -> float:
    """k of the paper's algorithm 1 (arXiv 2007.14966) from descending probabilities."""
    m, size = min(100, len(p)), len(p)
    t = [math.log((i + 2) / (i + 1)) for i in range(m - 1)]
    b = [math.log(p[i] / p[i + 1]) for i in range(m - 1)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    e = s - 1
    return (e * 2**mu / (1 - size**-e)) ** (1 / s)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mu", [-3.0, 0.5, 2.0, 5.0, 9.0, 1000.0])
@pytest.mark.parametrize("count", [2, 64, 400])
def test_the_zipf_cut_keeps_the_k_of_the_paper(seed: int, mu: float, count: int) -> None:
    logits = random_logits(seed, count)
    p = probabilities(logits)
    order = ordered(p)
    wanted = int(min(max(zipf_size([p[i] for i in order], min(mu, 50.0)), 1), count))
    assert kept(ZipfCut(mu)(logits)) == set(order[:wanted])


def test_the_zipf_cut_at_the_ends() -> None:
    exact = torch.arange(1, 1001, dtype=torch.float64).log().neg().float()  # exponent 1
    # The limit of the formula at exponent 1 is 2^mu / ln(N).
    assert len(kept(ZipfCut(8.0)(exact))) == pytest.approx(2**8 / math.log(1000), abs=1)
    flat = torch.zeros(64)  # exponent 0: the surprise does not depend on k
    assert [len(kept(ZipfCut(mu)(flat))) for mu in (-1000.0, 1000.0)] == [1, 64]
    certain = torch.tensor([0.0, -3e38, -math.inf])
    assert kept(ZipfCut(5.0)(certain)) == {0}
    few = random_logits(1)
    few[10:] = -math.inf
    assert kept(ZipfCut(1000.0)(few)) == set(range(10))


def test_mirostat_moves_its_cut_by_the_surprise_and_rewinds_it() -> None:
    state = Mirostat(tau=1.5, eta=0.1)
    assert state.mu == 3.0
    state.accept(11, 0.25)
    assert state.mu == pytest.approx(3.0 + 0.1 * (1.5 - 2.0))
    state.accept(12, 1.0)
    assert state.mu == pytest.approx(2.95 + 0.1 * 1.5)
    state.rewind(12)
    assert state.mu == pytest.approx(3.1)
    state.rewind(11)
    assert state.mu == pytest.approx(2.95)
    state.rewind(10)
    assert state.mu == 3.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("low", "high", "exponent"), [(0.5, 2.0, 1.0), (0.1, 1.0, 0.5), (1, 3, 2)])
def test_dynamic_temperature_follows_the_entropy(
    seed: int, low: float, high: float, exponent: float
) -> None:
    logits = random_logits(seed)
    logits[20:] = -math.inf
    p = [x for x in probabilities(logits) if x > 0]
    share = -sum(x * math.log(x) for x in p) / math.log(len(p))
    temperature = low + (high - low) * share**exponent
    powers = [x ** (1 / temperature) for x in p]
    got = probabilities(DynamicTemperature(low, high, exponent)(logits))[:20]
    assert got == pytest.approx([x / sum(powers) for x in powers], rel=1e-5)


def test_dynamic_temperature_at_the_ends() -> None:
    flat = DynamicTemperature(0.5, 2.0, 1.0)(torch.zeros(4))
    assert probabilities(flat) == pytest.approx([0.25] * 4)
    certain = torch.tensor([300.0, 0.0])
    assert kept(DynamicTemperature(0.0, 2.0, 1.0)(certain)) == {0}
    one = torch.tensor([2.0, -math.inf])
    assert torch.equal(DynamicTemperature(0.0, 2.0, 1.0)(one), one)


def xtc(p: list[float], q: float, threshold: float, protected: set[int]) -> list[float]:
    likeliest = [i for i in ordered(p) if p[i] >= threshold and i not in protected]
    excluded = likeliest[:-1]
    x = sum(p[i] for i in excluded)
    return [p[i] * (1 - q if i in excluded else 1 + q * x / (1 - x)) for i in range(len(p))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("q", [0.3, 1.0])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.2, 1.0])
@pytest.mark.parametrize("protected", [set(), {0, 1, 2, 3}])
def test_xtc_is_the_expectation(seed: int, q: float, threshold: float, protected: set[int]) -> None:
    logits = random_logits(seed, 12)
    p = probabilities(logits)
    got = probabilities(ExcludeTop(q, threshold, frozenset(protected))(logits))
    assert got == pytest.approx(xtc(p, q, threshold, protected), rel=1e-5, abs=1e-12)


def test_xtc_does_not_depend_on_the_order_of_tokens() -> None:
    after = ExcludeTop(1.0, 0.15)(logits_of(0.1, 0.4, 0.2, 0.3))
    assert probabilities(after) == pytest.approx([1 / 3, 0.0, 2 / 3, 0.0], rel=1e-6)
    guarded = ExcludeTop(1.0, 0.15, frozenset({1}))(logits_of(0.1, 0.4, 0.2, 0.3))
    assert probabilities(guarded) == pytest.approx([1 / 7, 4 / 7, 2 / 7, 0.0], rel=1e-6)


def test_ties_go_to_the_lowest_ids() -> None:
    assert kept(TopK(10)(torch.zeros(1000))) == set(range(10))
    two_levels = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    assert kept(TopK(3)(two_levels)) == {1, 3, 0}
    assert kept(SurpriseCut(-1.0)(two_levels)) == {1}
    assert kept(ExcludeTop(1.0, 0.2)(two_levels)) == {0, 2, 3, 4}


def test_dropped_tokens_stay_dropped() -> None:
    logits = random_logits(4)
    logits[:60] = -math.inf
    for step in STEPS:
        assert kept(step(logits)) <= {60, 61, 62, 63}


rows = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -math.inf])),
    min_size=1,
    max_size=40,
).filter(lambda row: max(row) > -math.inf)


@settings(max_examples=examples(150))
@given(row=rows, step=st.sampled_from([*CUTS, *RESHAPING]), seed=st.integers(0, 1000))
def test_cuts_keep_a_token_and_do_not_depend_on_ids(
    row: list[float], step: LogitStep, seed: int
) -> None:
    logits = torch.tensor(row)
    after = step(logits)
    assert kept(after)
    assert kept(after) <= kept(logits)
    assert not bool(after.isnan().any())
    if len(set(row)) < len(row) or (isinstance(step, ExcludeTop) and step.protected):
        return  # ties and protected tokens go by id
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(seed))
    # Sums over another order round differently: a float32 logit may differ in its last place.
    assert torch.allclose(step(logits[order]), after[order], rtol=1e-6, atol=1e-6)


def test_the_order_of_the_chain_is_the_documented_one() -> None:
    params = SamplerParams(0.7, 40, 0.9, 0.05, 1.1, penalty_range=2)
    assert steps_for(params, [5, 6, 7]) == [
        Penalties((5, 6, 7), 1.1, sustain=2),
        Temperature(0.7),
        TopK(40),
        TopP(0.9),
        MinP(0.05),
    ]
    assert steps_for(SamplerParams(), [1]) == []
    params = SamplerParams(
        presence_penalty=0.5,
        banned_tokens=frozenset({1}),
        token_bias={2: 1.0},
        dry_multiplier=0.8,
        allowed_tokens=frozenset({1, 2}),
        top_n_sigma=2.0,
        smoothing_factor=0.2,
        temperature=0.5,
        top_k=9,
        top_p=0.9,
        top_a=0.1,
        min_p=0.1,
        tfs=0.9,
        typical=0.8,
        mirostat_tau=2.0,
        max_temp=2.0,
        xtc_probability=0.5,
    )
    steps = steps_for(params, [5], {3}, torch.tensor([-1]))
    names = [type(step) for step in steps]
    assert names[:6] == [Penalties, Ban, Bias, Dry, Allow, Mask]
    assert names[6:12] == [TopNSigma, Smoothing, Temperature, TopK, TopP, TopA]
    assert names[12:] == [MinP, TailFree, Typical, SurpriseCut, DynamicTemperature, ExcludeTop]
    assert steps[1] == Ban(frozenset({1, 3}))
    assert steps[15] == SurpriseCut(4.0)
    last = SamplerParams(temperature=0.5, temperature_last=True, top_k=4)
    assert steps_for(last, []) == [TopK(4), Temperature(0.5)]
    assert steps_for(SamplerParams(temperature=0.0, temperature_last=True), []) == [TopK(1)]
