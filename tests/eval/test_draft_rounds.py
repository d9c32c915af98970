"""Speculative rounds: known acceptance probabilities are recovered, and counters are consistent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exl_core.engine.engine import Engine
from exl_core.engine.request import Report
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from exl_core.speculate.stats import expected_length
from exl_eval.acceptance_result import AcceptanceFigures, Costs, Speeds, figures_of
from exl_eval.draft_rounds import RecordingDrafter, Round, count, record_reply
from support.driving import GREEDY, ask, engine_for
from support.guessing import DrawingDrafter, ScriptedDrafter, half_right, right, wrong
from support.scripted import VOCAB_SIZE, HashRule, Rule, always

GAMMA = 4
FREE = Costs(0.0, (1.0,) * 32)
SPEEDS = Speeds(100.0, 150.0, 160.0)
SAMPLED = SamplerParams(seed=3)


def spread_over(*token_ids: int) -> Tensor:
    """Distribution with equal probabilities for these tokens."""
    spread = torch.zeros(VOCAB_SIZE)
    spread[list(token_ids)] = 1.0 / len(token_ids)
    return spread


def recording(rule: Rule, drafter: Drafter) -> tuple[Engine, RecordingDrafter]:
    recorder = RecordingDrafter(drafter)
    return engine_for(rule, drafter=recorder, adapt_drafts=False), recorder


def figures(rounds: tuple[Round, ...], costs: Costs = FREE, longest: int = 8) -> AcceptanceFigures:
    return figures_of(rounds, count(rounds), costs, SPEEDS, draft_tokens=GAMMA, longest=longest)


@pytest.mark.thorough
def test_alpha_tau_and_utilization_of_simulated_drafts_are_recovered() -> None:
    """With alpha 0.8 and four draft tokens, tau is 3.36 and utilization 0.59."""
    wanted, drawn_from = spread_over(1, 2, 3, 4, 5), spread_over(1, 2, 3, 4, 6)
    drafter = DrawingDrafter(lambda _: 0, max_tokens=GAMMA, spread=drawn_from)
    engine, recorder = recording(always(wanted.clamp(min=1e-20).log()), drafter)
    request = ask(
        max_tokens=2000, sampler=SAMPLED, report=Report(logits=True), stop_ids=frozenset()
    )
    found = figures(record_reply(engine, recorder, request).rounds)

    assert found.alpha.mean == pytest.approx(0.8, abs=1e-6)  # exact, independent of the samples
    assert found.alpha_estimate.mean is not None
    assert found.alpha_estimate.stderr is not None
    assert abs(found.alpha_estimate.mean - 0.8) < 3 * found.alpha_estimate.stderr < 0.05
    tau = expected_length(0.8, GAMMA)
    assert f"{tau:.2f} {(tau - 1) / GAMMA:.2f}" == "3.36 0.59"
    assert found.tau.mean is not None
    assert found.tau.stderr is not None
    assert abs(found.tau.mean - tau) < 3 * found.tau.stderr < 0.3
    assert found.stats.utilization is not None
    assert abs(found.stats.utilization - 0.59) < 3 * found.tau.stderr / GAMMA
    assert found.system_efficiency == pytest.approx(found.tau.mean / (GAMMA + 1))
    # Only the last round has fewer draft tokens, because the reply ends.
    assert found.theory_tokens == pytest.approx(tau, rel=0.005)
    assert found.theory_speed_up == found.theory_tokens


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["right", "half_right", "wrong", "n-gram"])
def test_counters_of_recorded_runs_obey_their_identities(kind: str, sampler: SamplerParams) -> None:
    rule = HashRule(spread=1.5)
    drafters: dict[str, Drafter] = {
        "right": ScriptedDrafter(right(rule), max_tokens=GAMMA),
        "half_right": ScriptedDrafter(half_right(rule), max_tokens=GAMMA),
        "wrong": ScriptedDrafter(wrong(rule), max_tokens=GAMMA),
        "n-gram": NgramDrafter(max_tokens=GAMMA, min_match=1, min_confidence=0.0),
    }
    engine, recorder = recording(rule, drafters[kind])
    report = Report(logits=not sampler.is_greedy)
    request = ask([5] * 30, max_tokens=120, sampler=sampler, report=report, stop_ids=frozenset())
    recorded = record_reply(engine, recorder, request)

    stats, whole = count(recorded.rounds), recorded.end.drafting
    assert whole is not None
    # The engine also counts the prompt's pass: one round, one token.
    assert (stats.rounds + 1, stats.emitted + 1) == (whole.rounds, whole.emitted)
    assert (stats.drafted, stats.accepted) == (whole.drafted, whole.accepted)
    assert (stats.rejected, stats.accepted_at) == (whole.rejected, whole.accepted_at)
    assert stats.emitted == recorded.end.completion_tokens - 1 == 119
    assert stats.emitted in (stats.accepted + stats.rounds, stats.accepted + stats.rounds - 1)
    assert stats.accepted + stats.rejected <= stats.drafted
    assert sum(stats.accepted_at) == stats.accepted
    chances = [chance for one in recorded.rounds for chance in one.chances]
    assert len(chances) == stats.accepted + stats.rejected
    if sampler.is_greedy:
        assert sum(chances) == stats.accepted
    else:
        error = math.sqrt(sum(chance * (1 - chance) for chance in chances))
        assert abs(sum(chances) - stats.accepted) < 4 * error + 1e-6
    if kind == "right" and sampler.is_greedy:
        assert stats.rejected == 0
        assert stats.rounds == 24  # 119 tokens, five per round
    if kind == "wrong":
        assert stats.accepted == 0


def test_every_round_has_a_draft_even_if_drafting_does_not_pay() -> None:
    drafter = ScriptedDrafter(wrong(HashRule()), max_tokens=GAMMA)
    engine, recorder = recording(HashRule(), drafter)
    rounds = record_reply(engine, recorder, ask(max_tokens=41, stop_ids=frozenset())).rounds
    # Drafts get shorter where less of the reply is left.
    assert [one.drafted for one in rounds] == [GAMMA] * 36 + [3, 2, 1, 0]


def test_settings_without_acceptance_probabilities_are_refused() -> None:
    engine, recorder = recording(HashRule(), NgramDrafter())
    with pytest.raises(RequestError, match="temperature 1 with logits"):
        record_reply(engine, recorder, ask(sampler=SamplerParams(temperature=0.5, seed=1)))


def full(accepted: int) -> Round:
    emitted, looked_at = accepted + 1, min(accepted + 1, GAMMA)
    return Round(GAMMA, accepted, emitted, (0.5,) * looked_at)


def test_break_even_and_best_length_follow_from_the_costs() -> None:
    rounds = (full(0), full(1), full(2), full(4))
    dear = Costs(0.5, tuple(1.0 + 0.1 * rows for rows in range(9)))
    found = figures(rounds, dear, longest=GAMMA)
    # A round costs 1.4 for its pass and 2.0 for its drafts, and emits 11 / 4 tokens.
    assert found.break_even_tau == pytest.approx(3.4)
    assert found.predicted_speed_up == pytest.approx(2.75 / 3.4)
    # Drafts of one token give 1 + 3 / 4 tokens at a cost of 1.6; two give 1 + 5 / 4 at 2.2. Longer
    # drafts give still fewer tokens per cost.
    assert found.best_length == 1
    assert found.best_speed_up == pytest.approx(1.75 / 1.6)
    assert figures(rounds, FREE, longest=GAMMA).best_length == GAMMA
    hopeless = figures((full(0),) * 4, dear, longest=GAMMA)
    assert (hopeless.best_length, hopeless.best_speed_up) == (0, 1.0)


def test_speed_up_of_longer_drafts_is_extrapolated_with_alpha() -> None:
    rounds = (full(4),) * 10
    found = figures(rounds, FREE, longest=8)
    # All four are accepted. Each of four more has probability 0.5 if its predecessor was accepted:
    # 0.5 + 0.25 + 0.125 + 0.0625 tokens.
    assert found.best_length == 8
    assert found.best_speed_up == pytest.approx(5.9375)


def test_draft_figures_are_none_without_drafts() -> None:
    found = figures((Round(0, 0, 1, ()),) * 5).as_dict()
    assert found["utilization"] is found["theory_speed_up"] is None
    assert found["alpha"] == {"mean": None, "stderr": None}
    assert (found["predicted_speed_up"], found["best_length"]) == (1.0, 0)
    assert found["measured_speed_up"] == 1.5
