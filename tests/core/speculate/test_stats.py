"""`DraftStats`: rates compared with their definitions and with theory."""

from __future__ import annotations

import math
import random

import pytest

from exl_core.speculate.stats import DraftStats, expected_length


def test_rates_of_three_rounds() -> None:
    stats = (
        DraftStats()
        .with_round(drafted=4, accepted=4, emitted=5)
        .with_round(drafted=4, accepted=1, emitted=2)
        .with_round(drafted=0, accepted=0, emitted=1)
    )
    assert stats == DraftStats(3, 8, 5, 1, 8, (2, 1, 1, 1))
    assert stats.utilization == 5 / 8
    assert stats.alpha == 5 / 6
    assert stats.mean_length == 8 / 3
    assert stats.mean_accepted == 5 / 3
    assert stats.efficiency == 8 / 11
    assert stats.position_rates == (2 / 3, 1 / 3, 1 / 3, 1 / 3)
    assert sum(stats.position_rates) == pytest.approx(stats.mean_accepted)


def test_a_reply_that_ends_within_a_draft_counts_no_rejection() -> None:
    stats = DraftStats().with_round(drafted=4, accepted=2, emitted=2)
    assert stats.rejected == 0
    assert stats.alpha == 1.0


def test_rates_without_rounds_are_none() -> None:
    none = DraftStats()
    assert none.utilization is none.alpha is none.mean_length is none.mean_accepted is None
    assert none.efficiency is None
    assert none.position_rates == ()


def test_counts_add_up() -> None:
    one = DraftStats().with_round(drafted=2, accepted=1, emitted=2)
    other = DraftStats().with_round(drafted=3, accepted=3, emitted=4)
    assert one + other == other + one
    assert (one + other).accepted_at == (2, 1, 1)


def test_alpha_08_and_four_drafted_give_tau_336_and_utilization_059() -> None:
    alpha, drafted, rounds = 0.8, 4, 20000
    draws = random.Random(1)
    stats = DraftStats()
    lengths = []
    for _ in range(rounds):
        accepted = 0
        while accepted < drafted and draws.random() < alpha:
            accepted += 1
        lengths.append(accepted + 1)
        stats = stats.with_round(drafted=drafted, accepted=accepted, emitted=accepted + 1)
    tau = expected_length(alpha, drafted)
    assert tau == pytest.approx((1 - alpha**5) / (1 - alpha))
    assert f"{tau:.2f} {(tau - 1) / drafted:.2f}" == "3.36 0.59"
    assert stats.emitted == stats.accepted + stats.rounds
    assert stats.mean_length is not None
    assert stats.utilization is not None
    assert stats.alpha is not None
    error = math.sqrt(sum((length - tau) ** 2 for length in lengths) / rounds / rounds)
    assert abs(stats.mean_length - tau) < 4 * error
    assert abs(stats.utilization - (tau - 1) / drafted) < 4 * error / drafted
    looked_at = stats.accepted + stats.rejected
    assert abs(stats.alpha - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / looked_at)
    assert stats.position_rates == pytest.approx([alpha**i for i in range(1, 5)], abs=0.015)
