"""Draft acceptance on a real model: the figures of one run are consistent with each other."""

from __future__ import annotations

import json
import math

import pytest

from exl_core.session.load import LoadedModel
from exl_eval.acceptance import AcceptanceOptions, measure_acceptance
from exl_eval.acceptance_result import AcceptanceFigures
from exl_eval.prompts import CATEGORIES

pytestmark = pytest.mark.thorough


def check(found: AcceptanceFigures, replies: int) -> None:
    stats = found.stats
    assert stats.accepted + stats.rejected <= stats.drafted
    assert 0 <= stats.accepted + stats.rounds - stats.emitted <= replies
    assert sum(stats.accepted_at) == stats.accepted
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    assert found.tau.mean == pytest.approx(stats.emitted / stats.rounds)
    assert stats.mean_accepted == pytest.approx(sum(stats.position_rates))
    assert found.system_efficiency == pytest.approx(stats.emitted / (stats.rounds * 5))
    assert found.tau.mean is not None
    assert found.break_even_tau is not None
    assert found.predicted_speed_up == pytest.approx(found.tau.mean / found.break_even_tau)
    assert found.best_speed_up >= 1.0
    if stats.drafted:
        assert found.alpha.mean is not None
        assert 0.0 <= found.alpha.mean <= 1.0


@pytest.mark.parametrize("kind", ["ngram", pytest.param("model", marks=pytest.mark.thorough)])
def test_figures_of_a_short_run_are_consistent(kind: str, smollm2: LoadedModel) -> None:
    is_model = kind == "model"
    options = AcceptanceOptions(draft_tokens=4, max_tokens=16 if is_model else 12, prompts=1)
    result = measure_acceptance(smollm2, smollm2 if is_model else None, options)
    json.dumps(result.as_dict(), allow_nan=False)
    greedy, sampled = result.samplers
    for sampler in result.samplers:
        assert tuple(sampler.categories) == CATEGORIES
        for group in sampler.categories.values():
            check(group, replies=1)
        check(sampler.overall, replies=4)
        stats = [group.stats for group in sampler.categories.values()]
        assert sum(one.emitted for one in stats) == sampler.overall.stats.emitted
        assert sampler.costs.pass_s[0] > 0
    assert greedy.overall.alpha.mean == greedy.overall.alpha_estimate.mean
    if is_model:
        # The model drafts for itself. Alpha is below 1 only because passes of several rows round
        # differently from passes of one row.
        assert greedy.overall.stats.drafted > 40
        assert sampled.overall.alpha.mean == pytest.approx(1.0, abs=0.02)
        estimate = sampled.overall.alpha_estimate
        assert estimate.mean is not None
        assert sampled.overall.alpha.mean is not None
        count = sampled.overall.stats.accepted + sampled.overall.stats.rejected
        error = math.sqrt(0.02 * 0.98 / count)
        assert abs(estimate.mean - sampled.overall.alpha.mean) < 4 * error
