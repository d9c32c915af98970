"""`NgramDrafter`: its proposals, when it proposes nothing, and changes of the sequence."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import DraftJob
from exl_core.speculate.ngram import NgramDrafter
from exl_core.speculate.ngram_index import NgramIndex
from exl_core.speculate.stats import DraftStats


def job(token_ids: Sequence[int], max_tokens: int = 99, request_id: str = "r") -> DraftJob:
    return DraftJob(request_id, token_ids, (), (), max_tokens, SamplerParams())


def guess(drafter: NgramDrafter, token_ids: Sequence[int], max_tokens: int = 99) -> list[int]:
    [draft] = drafter.propose([job(token_ids, max_tokens)])
    assert draft.probabilities is None
    return list(draft.token_ids)


def follow(drafter: NgramDrafter, prompt: Sequence[int], reply: Sequence[int]) -> DraftStats:
    """Draft for a model whose reply is fixed."""
    sequence, done, stats = list(prompt), 0, DraftStats()
    while done < len(reply):
        proposed = guess(drafter, sequence, len(reply) - done - 1)
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == reply[done + accepted]:
            accepted += 1
        sequence += reply[done : done + accepted + 1]
        done += accepted + 1
        stats = stats.with_round(drafted=len(proposed), accepted=accepted, emitted=accepted + 1)
    return stats


def test_tokens_after_the_same_context_are_proposed() -> None:
    drafter = NgramDrafter(max_tokens=4, min_confidence=0.0)
    assert guess(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5]) == [6, 7, 8, 9]


def test_a_short_match_yields_a_shorter_draft_than_a_long_one() -> None:
    text = list(range(50))
    short = guess(NgramDrafter(), [*text, 10, 11])
    long = guess(NgramDrafter(), [*text, *range(10, 30)])
    assert 0 < len(short) < len(long) == 8
    assert short == text[12 : 12 + len(short)]
    assert long == text[30:38]


def test_a_longer_context_beats_a_newer_or_more_frequent_one() -> None:
    history = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 3, 4, 60, 7, 1, 2, 3, 4]
    assert guess(NgramDrafter(max_tokens=1, min_confidence=0.0), history) == [50]


def test_matches_are_compared_beyond_the_longest_context() -> None:
    history = [9, 8, 1, 2, 3, 50, 7, 7, 1, 2, 3, 60, 9, 8, 1, 2, 3]
    drafter = NgramDrafter(max_tokens=1, max_match=3, min_confidence=0.0)
    assert guess(drafter, history) == [50]


def test_among_equal_contexts_the_frequent_then_the_newer_successor_wins() -> None:
    drafter = NgramDrafter(max_tokens=1, min_match=1, max_match=2, min_confidence=0.0)
    assert guess(drafter, [5, 60, 6, 5, 60, 7, 5, 50, 8, 5]) == [60]
    drafter.forget("r")
    assert guess(drafter, [5, 60, 7, 5, 50, 8, 5]) == [50]


def test_a_periodic_sequence_is_continued_past_its_end() -> None:
    drafter = NgramDrafter(max_tokens=7, min_confidence=0.0)
    assert guess(drafter, [1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]
    assert guess(drafter, [1, 2, 3, 1, 2, 3, 1]) == [2, 3, 1, 2, 3, 1, 2]


def test_a_replaced_token_does_not_end_a_long_match() -> None:
    drafter = NgramDrafter(max_tokens=4)
    live = [*range(50), *range(10, 30)]
    assert guess(drafter, live) == [30, 31, 32, 33]
    live += [30, 31, 99]  # instead of 32
    assert guess(drafter, live) == [33, 34]
    live += [33, 34, 35]
    assert guess(drafter, live)[:2] == [36, 37]


def test_nothing_is_proposed_without_a_match() -> None:
    drafter = NgramDrafter()
    assert guess(drafter, [7]) == []
    assert guess(drafter, list(range(100))) == []
    assert guess(NgramDrafter(min_match=3), [1, 2, 3, 9, 2, 3]) == []


def test_a_draft_is_never_longer_than_allowed() -> None:
    drafter = NgramDrafter(max_tokens=3, min_confidence=0.0)
    history = [1, 2, 3, 4, 5, 6, 1, 2]
    assert guess(drafter, history, 2) == [3, 4]
    assert guess(drafter, history) == [3, 4, 5]
    assert guess(drafter, history, 0) == []


def test_preloaded_text_is_used_by_every_request() -> None:
    drafter = NgramDrafter(max_tokens=2, preload=[10, 11, 12, 13, 14, 15])
    first, second = drafter.propose([job([1, 10, 11, 12]), job([2, 12, 13, 14], request_id="s")])
    assert first.token_ids == (13, 14)
    assert second.token_ids[:1] == (15,)


def test_the_own_sequence_beats_preloaded_text() -> None:
    drafter = NgramDrafter(max_tokens=1, min_confidence=0.0, preload=[1, 2, 50])
    assert guess(drafter, [1, 2, 60, 1, 2]) == [60]


def test_requests_do_not_share_their_sequences() -> None:
    drafter = NgramDrafter()
    drafter.propose([job([1, 2, 3, 4, 5, 6], request_id="other")])
    assert guess(drafter, [1, 2, 3]) == []
    drafter.forget("other")
    drafter.forget("never seen")
    drafter.moved([(1, 2)])


def test_a_rewound_sequence_is_detected() -> None:
    drafter = NgramDrafter(max_tokens=2, min_confidence=0.0)
    live = [1, 2, 3, 4, 5, 6, 1, 2]
    assert guess(drafter, live) == [3, 4]
    del live[2:]
    assert guess(drafter, live) == []
    live += [70, 80, 90, 1, 2]
    assert guess(drafter, live) == [70, 80]
    live[2:] = [30, 31, 32, 33, 1, 2]  # rewound and grown again between two calls
    assert guess(drafter, live) == [30, 31]


ids = st.integers(0, 3)


@given(st.lists(st.tuples(st.lists(ids, max_size=12), st.integers(0, 12)), max_size=8))
def test_a_rewound_index_equals_a_new_one(
    steps: list[tuple[list[int], int]],
) -> None:
    index = NgramIndex(1, 3)
    for added, removed in steps:
        index.extend(added)
        index.rewind(max(0, len(index.tokens) - removed))
        fresh = NgramIndex(1, 3)
        fresh.extend(index.tokens)
        assert index.find(index.tokens) == fresh.find(fresh.tokens)


@given(st.lists(ids, max_size=60))
def test_a_match_is_an_earlier_occurrence_of_the_end(tokens: list[int]) -> None:
    index = NgramIndex(2, 4)
    index.extend(tokens)
    match = index.find(tokens)
    pairs = {tuple(tokens[i - 2 : i]) for i in range(2, len(tokens))}
    assert (match is not None) == (tuple(tokens[-2:]) in pairs)
    if match is not None:
        start = match.position - match.length
        assert tokens[start : match.position] == tokens[len(tokens) - match.length :]
        assert len(match.follow(9)) == 9


def test_an_edited_text_takes_few_passes() -> None:
    draws = random.Random(4)
    prompt = [draws.randrange(5000) for _ in range(1500)]
    reply = [token if draws.random() > 0.03 else draws.randrange(5000) for token in prompt]
    stats = follow(NgramDrafter(), prompt, reply)
    assert stats.mean_length is not None
    assert stats.efficiency is not None
    # One token in 33 differs: at most 9 tokens per pass, and 0.97 ** 8 = 0.78 of the drafts are
    # accepted to their end.
    assert stats.mean_length > 6
    assert stats.efficiency > 0.7


@pytest.mark.parametrize("vocab_size", [40, 400, 40000])
def test_proposals_stop_soon_on_noise(vocab_size: int) -> None:
    draws = random.Random(5)
    noise = [draws.randrange(vocab_size) for _ in range(4000)]
    stats = follow(NgramDrafter(), noise[:3000], noise[3000:])
    assert stats.drafted < 0.02 * stats.rounds


def test_proposals_resume_when_the_text_repeats() -> None:
    draws = random.Random(6)
    noise = [draws.randrange(200) for _ in range(2000)]
    stats = follow(NgramDrafter(), noise, noise[1000:1500])
    assert stats.mean_length is not None
    assert stats.mean_length > 4


def test_a_proposal_takes_microseconds_at_8k_tokens() -> None:
    draws = random.Random(7)
    live = [draws.randrange(300) for _ in range(8192)]
    drafter = NgramDrafter()
    drafter.propose([job(live)])
    times = []
    for number in range(300):
        live.append(live[number])
        started = time.perf_counter()
        drafter.propose([job(live)])
        times.append(time.perf_counter() - started)
    assert median(times) < 150e-6  # about 15 us; the margin is for a busy machine


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"min_match": 0},
        {"min_match": 5, "max_match": 4},
        {"min_confidence": 1.5},
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(RequestError):
        NgramDrafter(**settings)  # type: ignore[arg-type]
