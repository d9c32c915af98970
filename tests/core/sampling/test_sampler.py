"""The sampler: equal to its steps on every backend, with its own state and random stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exl_core.ops.masks import pack
from exl_core.ops.open import get_table
from exl_core.sampling.chain import steps_for
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError, Sample, Sampler, guide
from exl_core.sampling.steps import descending, draw, greedy, skewed, softmax

OPS = get_table("cpu", threads=1)
REFERENCE = get_table("reference", threads=1)

COMMON = [
    SamplerParams(),
    SamplerParams(temperature=0.7),
    SamplerParams(top_k=40),
    SamplerParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    SamplerParams(top_p=0.3),
    SamplerParams(top_p=0.95),
    SamplerParams(temperature=1.7, top_p=0.99, min_p=0.001),
    SamplerParams(min_p=0.05),
    SamplerParams(temperature=0.6, top_k=3000, top_p=0.5),
    SamplerParams(top_k=10**9, top_p=0.8),
    SamplerParams(temperature=0.9, top_k=20, repetition_penalty=1.3, penalty_range=3),
    SamplerParams(temperature=0, repetition_penalty=1.5),
    SamplerParams(token_bias={3: 2.0, 4: -math.inf}, dry_multiplier=1.0, top_k=50),
    SamplerParams(allowed_tokens=frozenset(range(0, 60, 3)), banned_tokens=frozenset({9})),
]
RARE = [
    SamplerParams(top_a=0.2, top_k=40),
    SamplerParams(top_n_sigma=1.0, temperature=0.8),
    SamplerParams(top_n_sigma=2.0, top_k=40, min_p=0.02),
    SamplerParams(tfs=0.9, temperature=0.8),
    SamplerParams(typical=0.7, top_p=0.9),
    SamplerParams(smoothing_factor=0.3, temperature=0.7, top_k=30, min_p=0.05),
    SamplerParams(temperature=0.6, temperature_last=True, top_k=30, top_p=0.9),
    SamplerParams(max_temp=2.0, min_temp=0.3, min_p=0.01),
    SamplerParams(max_temp=2.0, temperature=0.0, temperature_last=True, top_k=25),
    SamplerParams(
        xtc_probability=0.5, xtc_threshold=0.02, xtc_protected=frozenset(range(40)), top_k=30
    ),
    SamplerParams(skew=0.5, top_k=40, temperature=0.9),
    SamplerParams(smoothing_factor=0.2, smoothing_curve=2.5, top_p=0.9),
    SamplerParams(mirostat_tau=2.0, frequency_penalty=0.1),
    SamplerParams(mirostat_tau=2.0, mirostat_version=1, top_k=40),
    SamplerParams(mirostat_tau=3.0, mirostat_version=1, temperature=0.8),
]
CHAINS = COMMON + RARE


def random_logits(seed: int, count: int, spread: float = 3.0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * spread


def by_steps(
    params: SamplerParams, logits: Tensor, history: Sequence[int], uniform: float, num_top: int
) -> tuple[int, Tensor, list[int]]:
    """Reference by the steps: the token, all probabilities, and the likeliest tokens."""
    for step in steps_for(params, history):
        logits = step(logits)
    p = softmax(logits)
    order = descending(p)
    if params.is_greedy:
        token = greedy(logits)
    elif params.skew != 0.0:
        token = int(order[draw(p[order], skewed(uniform, params.skew))])
    else:
        token = draw(p, uniform)
    return token, p, [i for i in order[:num_top].tolist() if p[i] > 0]


@pytest.mark.parametrize("count", [5, 50, 257, 3000])
@pytest.mark.parametrize("params", CHAINS, ids=lambda p: f"chain{CHAINS.index(p)}")
def test_a_sample_equals_the_result_of_its_steps(params: SamplerParams, count: int) -> None:
    history = [1, 5, 7, 3, 5, 7]
    for seed, spread in enumerate((0.3, 2.0, 8.0)):
        logits = random_logits(seed, count, spread)
        before = logits.clone()
        samplers = [Sampler(replace(params, seed=seed), ops) for ops in (OPS, REFERENCE)]
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            uniform = 0.0
            if not params.is_greedy:
                uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            token, p, top = by_steps(params, logits, history, uniform, 3)
            for sampler in samplers:
                got = sampler.sample(logits, history, num_top=3, want_probability=True)
                assert got.token_id == token
                assert got.probability == pytest.approx(float(p[token]), rel=1e-5)
                assert [i for i, q in got.top if q > 0] == top
                shares = [q for _, q in got.top if q > 0]
                assert shares == pytest.approx(p[top].tolist(), rel=1e-5)
        spread_out = samplers[0].probabilities(logits, history)
        assert spread_out.dtype == torch.float32
        if params.skew == 0.0:
            assert torch.allclose(spread_out.double(), p, rtol=1e-5, atol=1e-12)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("params", CHAINS, ids=lambda p: f"chain{CHAINS.index(p)}")
def test_inference_mode_logits_are_sampled_like_any_others(params: SamplerParams) -> None:
    """Such logits are a row of a batch, computed in inference mode."""
    with torch.inference_mode():
        logits = random_logits(7, 200).repeat(3, 1)
    plain = random_logits(7, 200)
    one, other = (Sampler(replace(params, seed=1), OPS) for _ in range(2))
    q = torch.full((200,), 1 / 200)
    for history in ([], [1, 2, 3, 1, 2]):
        assert one.sample(logits[1], history) == other.sample(plain, history)
        assert one.verify(logits[2], history, 5, q) == other.verify(plain, history, 5, q)
    assert torch.equal(logits[0], plain)


@pytest.mark.parametrize("params", CHAINS, ids=lambda p: f"chain{CHAINS.index(p)}")
def test_begin_and_finish_equal_sample(params: SamplerParams) -> None:
    vocab = 200
    logits = torch.stack([random_logits(i, vocab) for i in range(3)])
    one, other = (Sampler(replace(params, seed=1), OPS) for _ in range(2))
    assert one.can_begin is (params in COMMON)
    mask = pack(range(0, vocab, 3), vocab)
    for i in range(3) if one.can_begin else ():
        rest = {"banned": {3, 30}, "mask": mask, "num_top": i}
        begun = one.begin(i, vocab, [1, 2, 3], **rest)  # type: ignore[arg-type]
        sampled = OPS.sample_rows(logits, [begun])[0]
        got = one.finish(sampled, lambda: pytest.fail("read"), want_probability=i > 0)
        assert got == other.sample(
            logits[i],
            [1, 2, 3],
            want_probability=i > 0,
            **rest,  # type: ignore[arg-type]
        )


def test_finish_reports_why_no_token_could_be_sampled() -> None:
    sampler = Sampler(SamplerParams(), OPS)
    logits = torch.full((1, 9), math.nan)
    sampled = OPS.sample_rows(logits, [sampler.begin(0, 9, [])])[0]
    with pytest.raises(LogitsError, match="NaN"):
        sampler.finish(sampled, lambda: logits[0])


def test_details_are_returned_only_if_requested() -> None:
    logits = random_logits(1, 100)
    assert Sampler(SamplerParams(seed=1), OPS).sample(logits, []).probability is None
    assert Sampler(SamplerParams(seed=1), OPS).sample(logits, []).top == ()
    top = Sampler(SamplerParams(top_k=2), OPS).sample(logits, [], num_top=5).top
    assert len(top) == 2
    assert sum(p for _, p in top) == pytest.approx(1.0)
    greedy_sample = Sampler(SamplerParams(temperature=0), OPS).sample(
        logits, [], num_top=5, want_probability=True
    )
    best = int(logits.argmax())
    assert greedy_sample == Sample(best, 1.0, ((best, 1.0),))


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = random_logits(3, 1000, 2.0)

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplerParams(seed=seed), OPS)
        return [sampler.sample(logits, []).token_id for _ in range(30)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_the_global_random_stream_is_not_used() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Sampler(SamplerParams(), OPS).sample(torch.zeros(100), [])
    assert torch.equal(torch.rand(3), expected)


def test_greedy_takes_the_lowest_id_among_ties() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    for params in (
        SamplerParams(temperature=0),
        SamplerParams(top_k=1),
        SamplerParams(temperature=0.005, temperature_last=True),
    ):
        assert Sampler(params, OPS).sample(logits, []).token_id == 1


def test_the_penalty_follows_a_history_that_grows_and_is_rewound() -> None:
    params = SamplerParams(temperature=0, repetition_penalty=100.0)
    sampler = Sampler(params, OPS)
    logits = torch.arange(1000, 0, -1).float()
    history: list[int] = []
    for _ in range(700):
        history.append(sampler.sample(logits, history).token_id)
    assert history == list(range(700))
    del history[300:]
    sampler.rewind(300)
    assert sampler.sample(logits, history).token_id == 300
    history[100:] = [5000]  # id of an embedded vector, not a token
    sampler.rewind(100)
    assert sampler.sample(logits, history).token_id == 100


def test_dry_stops_a_loop() -> None:
    logits = torch.tensor([3.0, 2.9, 2.8, 0.0])
    sampler = Sampler(SamplerParams(temperature=0, dry_multiplier=1.0), OPS)
    history: list[int] = []
    for _ in range(12):
        history.append(sampler.sample(logits, history).token_id)
    assert history[:4] == [0, 0, 0, 0]
    assert set(history) == {0, 1, 2}


def test_mirostat_keeps_its_cut_and_rewinds_it() -> None:
    params = SamplerParams(mirostat_tau=2.0, mirostat_eta=0.5, seed=4)
    sampler, other = Sampler(params, OPS), Sampler(params, OPS)
    logits = random_logits(5, 200, 1.0)
    history: list[int] = []
    mu, trace = 4.0, []
    for _ in range(8):
        p = by_steps(params, logits, history, 0.5, 0)[1] if mu == 4.0 else None
        expected = logits
        for step in steps_for(params, history, mu=mu):
            expected = step(expected)
        wanted = softmax(expected)
        sample = sampler.sample(logits, history)
        assert sample.probability == pytest.approx(float(wanted[sample.token_id]), rel=1e-6)
        assert p is None or torch.allclose(p, wanted)
        sampler.accept(sample)
        trace.append(mu)
        history.append(sample.token_id)
        mu += 0.5 * (2.0 + math.log2(float(wanted[sample.token_id])))
    assert torch.equal(
        other.probabilities(logits, []), Sampler(params, OPS).probabilities(logits, [])
    )
    del history[3:]
    sampler.rewind(3)
    expected = logits
    for step in steps_for(params, history, mu=trace[3]):
        expected = step(expected)
    got = sampler.probabilities(logits, history)
    assert got.tolist() == pytest.approx(softmax(expected).tolist(), rel=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_target_surprise(version: int) -> None:
    params = SamplerParams(mirostat_tau=3.0, mirostat_version=version, seed=1)
    sampler = Sampler(params, OPS)
    logits = random_logits(2, 2000, 1.0)
    surprise = []
    for turn in range(400):
        sample = sampler.sample(logits, [0] * turn)
        sampler.accept(sample)
        assert sample.probability is not None
        surprise.append(-math.log2(sample.probability))
    # mu moves by eta * (tau - surprise) and stays bounded, so the mean surprise nears tau.
    assert sum(surprise[100:]) / 300 == pytest.approx(3.0, abs=0.35)


@pytest.mark.parametrize(
    "params", [SamplerParams(), SamplerParams(tfs=0.99)], ids=["common", "rare"]
)
def test_banned_and_masked_tokens_are_never_sampled(params: SamplerParams) -> None:
    logits = torch.tensor([5.0, 4.0, 3.0, 4.0])
    assert Sampler(SamplerParams(temperature=0), OPS).sample(logits, [], banned={0}).token_id == 1
    sampler = Sampler(replace(params, seed=1), OPS)
    assert {sampler.sample(logits, [], banned=[0, 1, 3]).token_id for _ in range(50)} == {2}
    mask = pack(frozenset({1, 3}), 4)
    assert {sampler.sample(logits, [], mask=mask).token_id for _ in range(50)} == {1, 3}
    picky = Sampler(replace(params, allowed_tokens=frozenset({0, 1}), seed=1), OPS)
    assert {picky.sample(logits, [], mask=mask).token_id for _ in range(50)} == {1}
    longer = pack(frozenset({1, 3, 90}), 100)
    assert {picky.sample(logits, [], mask=longer).token_id for _ in range(50)} == {1}


FAILING = [SamplerParams(), SamplerParams(temperature=0), SamplerParams(typical=0.5)]


@pytest.mark.parametrize("params", FAILING)
def test_no_remaining_token_is_an_error(params: SamplerParams) -> None:
    with pytest.raises(LogitsError, match="leave no token"):
        Sampler(params, OPS).sample(torch.zeros(3), [], banned={0, 1, 2})
    with pytest.raises(LogitsError, match="leave no token"):
        Sampler(params, OPS).probabilities(
            torch.zeros(3), [], mask=torch.tensor([0], dtype=torch.int32)
        )


@pytest.mark.parametrize("params", [*FAILING, SamplerParams(top_k=5)])
@pytest.mark.parametrize("place", [0, 17, 29_999])
@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_nan_and_infinite_logits_are_an_error_with_a_cause(
    params: SamplerParams, place: int, value: float, name: str
) -> None:
    logits = torch.zeros(30_000)
    logits[place] = value
    with pytest.raises(LogitsError, match=name) as caught:
        Sampler(params, OPS).sample(logits, [], banned={place})
    assert "exl doctor" in (caught.value.next_step or "")


def test_minus_infinity_is_an_error_only_for_all_tokens() -> None:
    logits = torch.tensor([-math.inf, 0.0])
    assert Sampler(SamplerParams(), OPS).sample(logits, []).token_id == 1
    with pytest.raises(LogitsError, match="minus infinity everywhere"):
        Sampler(SamplerParams(), OPS).sample(torch.full((4,), -math.inf), [])


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0])
def test_guidance_moves_away_from_the_negative(scale: float) -> None:
    positive, negative = random_logits(1, 50), random_logits(2, 50)
    wanted = scale * positive.double().log_softmax(0)
    wanted += (1 - scale) * negative.double().log_softmax(0)
    got = guide(positive, negative, scale)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_guidance_keeps_impossible_tokens_impossible() -> None:
    positive = torch.tensor([1.0, -math.inf, 2.0, -math.inf])
    negative = torch.tensor([1.0, 0.0, -math.inf, -math.inf])
    got = guide(positive, negative, 2.0)
    assert got[1] == got[3] == -math.inf
    assert got[2] == positive.log_softmax(0)[2]
    assert not bool(got.isnan().any())
