"""Draft lengths: bounded loss for wrong drafts, near the best length for right ones.

Simulated with pass times that were measured for a small model on two cores, relative to one row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_core.speculate.controller import DraftController, PassCosts

GAMMA = 8
TIMES = (1.0, 1.17, 1.22, 1.32, 1.68, 1.8, 1.9, 2.0, 2.1)
PASS_S = 0.01


@dataclass(frozen=True)
class Outcome:
    speed: float
    """Tokens per time of a pass without drafts; 1 without drafts."""
    lengths: tuple[int, ...]


def simulate(
    alpha: Callable[[int], float],
    num_tokens: int,
    *,
    draft_share: float = 0.0,
    seed: int = 0,
    noise: float = 0.05,
) -> Outcome:
    """Simulate a reply.

    alpha        accept rate by position in the reply
    draft_share  time per draft token, relative to a pass without drafts
    """
    draws = random.Random(seed)
    costs = PassCosts()
    controller = DraftController(costs, GAMMA)
    spent, emitted, lengths = 0.0, 0, []
    while emitted < num_tokens:
        length = controller.length(min(GAMMA, num_tokens - emitted - 1))
        accepted = 0
        while accepted < length and draws.random() < alpha(emitted + accepted):
            accepted += 1
        pass_s = TIMES[length] * (1.0 + noise * draws.uniform(-1.7, 1.7)) * PASS_S
        draft_s = draft_share * length * PASS_S
        costs.record(1 + length, pass_s)
        controller.record(
            drafted=length,
            accepted=accepted,
            emitted=accepted + 1,
            draft_s=draft_s,
            rows=1 + length,
        )
        spent += pass_s + draft_s
        emitted += accepted + 1
        lengths.append(length)
    return Outcome(emitted * PASS_S / spent, tuple(lengths))


def mean_speed(alpha: Callable[[int], float], num_tokens: int, draft_share: float = 0.0) -> float:
    runs = [simulate(alpha, num_tokens, draft_share=draft_share, seed=seed) for seed in range(20)]
    return sum(run.speed for run in runs) / len(runs)


def best_speed(alpha: float, draft_share: float = 0.0) -> float:
    """Rate with the best constant length for this accept rate."""
    return max(
        sum(alpha**i for i in range(length + 1)) / (TIMES[length] + draft_share * length)
        for length in range(GAMMA + 1)
    )


@pytest.mark.parametrize("draft_share", [0.0, 0.1])
@pytest.mark.parametrize(("num_tokens", "loss"), [(100, 0.03), (400, 0.02), (2000, 0.02)])
def test_drafts_that_are_never_accepted_cost_little(
    num_tokens: int, loss: float, draft_share: float
) -> None:
    assert mean_speed(lambda _: 0.0, num_tokens, draft_share) > 1.0 - loss


def test_the_loss_is_bounded_for_any_draft_cost() -> None:
    # Initial credit of 2 passes, at most one round of drafting, and the allowance of 1.5 %.
    num_tokens, draft_share = 1000, 0.3
    run = simulate(lambda _: 0.0, num_tokens, draft_share=draft_share, noise=0.0)
    most = 2.0 + TIMES[GAMMA] - 1.0 + GAMMA * draft_share + 0.015 * num_tokens
    assert num_tokens / run.speed - num_tokens <= most


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("draft_share", [0.0, 0.1])
def test_accepted_drafts_reach_nearly_the_best_rate(alpha: float, draft_share: float) -> None:
    assert mean_speed(lambda _: alpha, 400, draft_share) > 0.92 * best_speed(alpha, draft_share)


def test_perfect_drafts_reach_the_maximum_length() -> None:
    run = simulate(lambda _: 1.0, 2000)
    middle = run.lengths[20:-1]
    assert sum(length >= GAMMA - 1 for length in middle) == len(middle)


def test_the_length_adapts_to_a_change_of_the_accept_rate() -> None:
    speed = mean_speed(lambda i: 0.9 if i // 500 % 2 else 0.0, 2000)
    ideal = 2.0 / (1.0 + 1.0 / best_speed(0.9))
    assert speed > 0.9 * ideal


def test_trials_of_bad_drafts_become_rarer() -> None:
    lengths = simulate(lambda _: 0.0, 2000, noise=0.0).lengths
    tried = [place for place, length in enumerate(lengths) if length]
    waits = [after - before for before, after in pairwise(tried)]
    assert max(waits) > 60, "rarely in the end"
    assert max(waits) < 200, "but not never"
    late = [wait for place, wait in zip(tried, waits, strict=False) if place > 500]
    assert min(late) > 50
    assert all(lengths[place] <= 2 for place in tried if place > 100)


def test_drafts_stop_before_a_step_in_the_costs() -> None:
    # The fifth row costs as much as the second to fourth together: drafts of three, not four.
    lengths = simulate(lambda _: 0.6, 3000, noise=0.0).lengths[200:]
    assert sum(length == 3 for length in lengths) > 0.6 * len(lengths)


@given(
    st.lists(
        st.tuples(
            st.integers(0, GAMMA),  # limit of the draft
            st.integers(0, GAMMA),  # tokens that the drafter proposes
            st.integers(0, GAMMA),  # tokens that the model accepts
            st.booleans(),  # the reply ended within the draft
            st.floats(0.0, 1e3),  # seconds of drafting
            st.floats(0.0, 1e3),  # seconds of the pass
            st.integers(0, 600),  # other rows
            st.integers(0, 7),  # other sequences
        ),
        max_size=40,
    )
)
def test_lengths_stay_in_range_for_any_input(
    rounds: list[tuple[int, int, int, bool, float, float, int, int]],
) -> None:
    costs = PassCosts()
    controller = DraftController(costs, 5)
    for most, given_, taken, has_ended, draft_s, pass_s, others, sequences in rounds:
        length = controller.length(most, rows=1 + others, sequences=1 + sequences)
        assert 0 <= length <= min(most, 5)
        drafted = min(length, given_)
        accepted = min(drafted, taken)
        rows = 1 + others + drafted
        costs.record(rows, pass_s)
        controller.record(
            drafted=drafted,
            accepted=accepted,
            emitted=accepted if has_ended and accepted else accepted + 1,
            draft_s=draft_s,
            rows=rows,
            sequences=1 + sequences,
        )
        assert costs.seconds(rows) > 0.0


def test_lengths_are_deterministic() -> None:
    assert simulate(lambda _: 0.7, 300, seed=3) == simulate(lambda _: 0.7, 300, seed=3)


def test_the_time_of_the_first_draft_is_not_charged() -> None:
    costs = PassCosts()
    controller = DraftController(costs, 4)
    costs.record(1, 0.01)
    length = controller.length(4)
    assert length > 0
    costs.record(1 + length, 0.012)
    controller.record(drafted=length, accepted=length, emitted=length + 1, draft_s=5.0, rows=5)
    assert controller.length(4) > 0


def test_costs_between_measured_row_counts_are_interpolated() -> None:
    costs = PassCosts()
    assert costs.seconds(1) == 1.0, "in passes, before anything was measured"
    costs.record(1, 0.010)
    assert costs.seconds(1) == pytest.approx(0.010)
    assert 0.010 < costs.seconds(2) < 0.013
    costs.record(5, 0.018)
    assert costs.seconds(3) == pytest.approx(0.014)
    assert costs.seconds(7) == pytest.approx(0.022)


def test_costs_of_all_row_counts_follow_a_growing_context() -> None:
    costs = PassCosts()
    for _ in range(20):
        costs.record(1, 0.010)
        costs.record(4, 0.013)
    for _ in range(60):
        costs.record(1, 0.020)
    assert costs.seconds(1) == pytest.approx(0.020, rel=0.01)
    assert 0.018 < costs.seconds(4) < 0.026, "measured for one row only, it takes longer too"


@pytest.mark.parametrize("seconds", [0.0, 5e-324, -1.0])
def test_times_of_zero_are_ignored(seconds: float) -> None:
    costs = PassCosts()
    costs.record(2, seconds)
    costs.record(1, 0.010)
    costs.record(1, seconds)
    assert costs.seconds(1) == pytest.approx(0.010)


def test_one_disturbed_pass_changes_little() -> None:
    costs = PassCosts()
    for _ in range(20):
        costs.record(1, 0.010)
    costs.record(1, 3.0)
    assert costs.seconds(1) < 0.0135


def test_in_a_full_batch_a_draft_pays_for_the_delay_of_all_sequences() -> None:
    # The batch is compute-bound: every row takes the same time.
    costs = PassCosts()
    for rows in range(8, 25):
        costs.record(rows, 0.01 * rows)
    controller = DraftController(costs, 4)
    assert controller.length(4, rows=8, sequences=8) == 0
