"""Drafts in the engine: the same replies in fewer passes, correct counts, clean ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.constrain.regex import Regex
from exl_core.engine.drafting import MAX_FAILURES, Drafting
from exl_core.engine.events import FinishEvent, FinishReason, SampledToken
from exl_core.engine.request import Report, Request
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import Draft, Drafter, DraftJob
from exl_core.speculate.ngram import NgramDrafter
from exl_core.speculate.stats import DraftStats
from support.driving import ask, engine_for, run_all, run_one, run_to_failure
from support.guessing import DrawingDrafter, Guess, ScriptedDrafter, half_right, right, wrong
from support.scripted import VOCAB_SIZE, HashRule, Rule, ScriptedModel, always, reply_with

RULE = HashRule(spread=1.5)
TEXT = "abcdefghijklmnop"
SAMPLERS = [
    SamplerParams(temperature=0),
    SamplerParams(seed=1, top_k=4),
    SamplerParams(temperature=0.7, seed=2, repetition_penalty=1.3, dry_multiplier=0.8),
    SamplerParams(seed=3, mirostat_tau=2.0),
]


def standstill() -> float:
    """Clock that stands still, so that the controller uses its expected costs on any machine."""
    return 0.0


def drafted(
    rule: Rule, guess: Callable[[Rule], Guess] | Guess, **settings: Any
) -> tuple[Any, ScriptedDrafter]:
    """An engine and its drafter."""
    made = guess(rule) if guess in (right, half_right, wrong) else guess
    drafter = ScriptedDrafter(made, **settings)  # type: ignore[arg-type]
    return engine_for(rule, drafter=drafter, clock=standstill), drafter


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "seeded", "penalties", "mirostat"])
@pytest.mark.parametrize(
    "drafter",
    [
        ScriptedDrafter(right(RULE)),
        ScriptedDrafter(half_right(RULE), excess=5),
        ScriptedDrafter(wrong(RULE), max_tokens=1),
        ScriptedDrafter(lambda _: VOCAB_SIZE + 7),
        ScriptedDrafter(lambda history: history[-1]),
        NgramDrafter(min_match=1),
    ],
    ids=["right", "overlong", "wrong", "strange", "repeating", "n-gram"],
)
def test_the_reply_is_the_same_with_any_drafter(drafter: Drafter, sampler: SamplerParams) -> None:
    request = ask([5] * 250, sampler=sampler, max_tokens=40, stop_ids=frozenset())
    alone = run_one(engine_for(RULE), request)[1]
    end = run_one(engine_for(RULE, drafter=drafter, clock=standstill), request)[1]
    assert end.token_ids == alone.token_ids
    assert (end.text, end.reason) == (alone.text, alone.reason)
    if isinstance(drafter, ScriptedDrafter):
        assert drafter.num_proposed > 0, "or this tested nothing"
        assert not drafter.known


@pytest.mark.parametrize("guess", [right, half_right, wrong])
def test_draft_counts_match_the_rows_of_the_passes(guess: Callable[[Rule], Guess]) -> None:
    rule = reply_with(TEXT * 3)
    engine, drafter = drafted(rule, guess)
    _, end = run_one(engine, ask())
    stats = end.drafting
    assert stats is not None
    passes = engine.model.rows_of_pass
    assert stats.rounds == len(passes)
    assert stats.drafted == sum(passes[1:]) - (len(passes) - 1)
    assert sum(stats.accepted_at) == stats.accepted
    assert stats.emitted == end.completion_tokens == 49
    if guess is right:  # the last round ends with EOS, which was drafted or follows the drafts
        assert stats.rejected == 0
        assert stats.emitted in (stats.accepted + stats.rounds, stats.accepted + stats.rounds - 1)
        assert stats.rounds < 20
    else:
        assert stats.emitted == stats.accepted + stats.rounds
        assert stats.rejected > 0
    if guess is wrong:
        assert (stats.accepted, stats.rejected) == (0, drafter.num_proposed)


@pytest.mark.parametrize(
    ("reply", "limit", "counts"),
    [
        ("abc", 50, DraftStats(2, 2, 2, 0, 4, (1, 1))),  # b c drafted; EOS is sampled by the model
        ("ab", 50, DraftStats(2, 2, 2, 0, 3, (1, 1))),  # b EOS drafted
        ("a", 50, DraftStats(2, 2, 1, 0, 2, (1,))),  # EOS drafted, and one token after it
        ("abcdef", 3, DraftStats(2, 1, 1, 0, 3, (1,))),  # b drafted; c is sampled by the model
        ("abcdef", 1, DraftStats(1, 0, 0, 0, 1, ())),
    ],
)
def test_an_end_on_a_drafted_token_does_not_count_as_rejection(
    reply: str, limit: int, counts: DraftStats
) -> None:
    engine, _ = drafted(reply_with(reply), right)
    _, end = run_one(engine, ask(max_tokens=limit))
    assert end.drafting == counts


@pytest.mark.parametrize("max_tokens", range(8))
def test_max_tokens_is_exact(max_tokens: int) -> None:
    engine, _ = drafted(reply_with(TEXT), right, excess=3)
    _, end = run_one(engine, ask(max_tokens=max_tokens))
    assert end.text == TEXT[:max_tokens]
    assert (end.completion_tokens, end.reason) == (max_tokens, FinishReason.LENGTH)
    assert end.drafting is not None


def test_the_context_and_the_cache_are_filled_to_the_last_token() -> None:
    drafter = ScriptedDrafter(lambda _: 97)
    logits = torch.zeros(VOCAB_SIZE)
    logits[97] = 50.0
    for length in (40, 256, 257):
        engine = engine_for(always(logits), max_seq_len=length, drafter=drafter, clock=standstill)
        assert len(run_one(engine, ask("123", max_tokens=None))[1].token_ids) == length - 3
    engine = engine_for(always(logits), cache_tokens=256, drafter=drafter, clock=standstill)
    assert len(run_one(engine, ask("123", max_tokens=None))[1].token_ids) == 254


@pytest.mark.parametrize("stop", ["c", "cd", "efg", "abcdefg"])
def test_a_stop_string_in_the_middle_of_a_draft(stop: str) -> None:
    engine, _ = drafted(reply_with(TEXT), right)
    _, end = run_one(engine, ask(stop_strings=(stop,)))
    assert end.text + end.held_text == TEXT[: TEXT.index(stop) + len(stop)]
    assert bytes(end.token_ids).decode() == end.text + end.held_text


def test_rejected_drafts_are_never_reused_from_the_cache() -> None:
    """Their values are in the cache, behind the registered part of a page that is reused."""
    prompt = [*range(1, 251)]
    engine, _ = drafted(RULE, wrong, max_tokens=8)
    request = ask(prompt, max_tokens=4, stop_ids=frozenset())
    first = run_one(engine, request)[1]
    again = ask([*prompt, *first.token_ids, 9], max_tokens=8, stop_ids=frozenset())
    assert run_one(engine, again)[1].token_ids == run_one(engine_for(RULE), again)[1].token_ids


def test_preemption_with_drafts_does_not_change_replies() -> None:
    requests = [
        ask([10 + i] * 200, max_tokens=100, sampler=SAMPLERS[i % 2], stop_ids=frozenset())
        for i in range(5)
    ]
    alone = [run_one(engine_for(RULE), request)[1].token_ids for request in requests]
    drafter = ScriptedDrafter(right(RULE), max_tokens=6)
    engine = engine_for(RULE, cache_tokens=4 * 256, drafter=drafter, clock=standstill)
    for request in requests:
        engine.submit(request)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    assert [ends[request.request_id].token_ids for request in requests] == alone
    assert engine.scheduler.num_requeued > 0, "or this tested nothing"
    assert not drafter.known


@pytest.mark.parametrize(
    "extra",
    [
        {"banned_strings": ("cd", "K")},
        {"constraints": (Regex("a[b-h]*"),)},
        {"banned_strings": ("de",), "constraints": (Regex("[a-p]*"),), "stop_strings": ("gh",)},
        {"hooks": (lambda token: 120 if token.token_id == 101 else None,)},
        {"min_tokens": 30},
    ],
    ids=["banned", "constraint", "all three", "hook", "min_tokens"],
)
@pytest.mark.parametrize("guess", [right, half_right])
def test_drafts_with_other_features(extra: dict[str, Any], guess: Callable[[Rule], Guess]) -> None:
    rule = reply_with(TEXT)
    alone = run_one(engine_for(rule), ask(max_tokens=40, **extra))[1]
    engine, drafter = drafted(rule, guess)
    end = run_one(engine, ask(max_tokens=40, **extra))[1]
    assert (end.text, end.token_ids, end.reason) == (alone.text, alone.token_ids, alone.reason)
    assert drafter.num_proposed > 0


def test_reports_equal_those_without_drafts() -> None:
    def reported(**rest: Any) -> list[SampledToken]:
        engine = engine_for(RULE, clock=standstill, **rest)
        report = Report(probabilities=True, top_tokens=2, logits=True)
        request = ask(max_tokens=30, sampler=SAMPLERS[1], report=report, stop_ids=frozenset())
        engine.submit(request)
        return [token for event in run_all(engine) for token in getattr(event, "tokens", ())]

    plain, drafting = reported(), reported(drafter=ScriptedDrafter(right(RULE)))
    assert len(plain) == 30
    for one, other in zip(plain, drafting, strict=True):
        assert (one.token_id, one.probability, one.top) == (
            other.token_id,
            other.probability,
            other.top,
        )
        assert one.logits is not None
        assert other.logits is not None
        assert torch.equal(one.logits, other.logits)


def test_allow_drafts_false_disables_drafts() -> None:
    engine, drafter = drafted(reply_with(TEXT), right)
    _, end = run_one(engine, ask(allow_drafts=False))
    assert end.text == TEXT
    assert drafter.num_proposed == 0
    assert end.drafting == DraftStats(17, 0, 0, 0, 17, ())


def test_sampled_drafts_do_not_change_the_distribution() -> None:
    """Frequencies of independent tokens, within four standard errors."""
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05])
    offered = torch.zeros(VOCAB_SIZE)
    offered[97:101] = torch.tensor([0.1, 0.3, 0.2, 0.4])
    logits = torch.full((VOCAB_SIZE,), -math.inf)
    logits[97:101] = wanted.log()
    drafter = DrawingDrafter(lambda _: 0, spread=offered)
    engine = engine_for(always(logits), drafter=drafter, clock=standstill)
    count = 1600
    request = ask(max_tokens=count, sampler=SamplerParams(seed=11))
    _, end = run_one(engine, request)
    assert end.drafting is not None
    assert end.drafting.accepted > 100, "or this tested little"
    assert end.drafting.rejected > 100
    seen = Counter(end.token_ids)
    for token_id, share in enumerate(wanted.tolist(), start=97):
        error = math.sqrt(share * (1 - share) / count)
        assert abs(seen[token_id] / count - share) < 4 * error


@pytest.mark.parametrize("error", [ValueError("no guess"), MemoryError(), KeyError(1)])
def test_a_failing_drafter_costs_its_drafts_and_no_request(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine, drafter = drafted(reply_with(TEXT), right)
    requests: list[Request] = [ask(), ask("R:")]
    for request in requests:
        engine.submit(request)
    engine.step()
    before = drafter.num_proposed
    drafter.failure = error
    ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    assert sorted((end.request_id, end.text) for end in ends) == sorted(
        (request.request_id, TEXT) for request in requests
    )
    assert drafter.num_proposed > before  # drafts go on in the next step
    assert [record.getMessage() for record in caplog.records] == [
        f"exl: warning: the drafter failed and this step has no drafts "
        f"({type(error).__name__}: {error})"
    ]


def test_a_drafter_that_keeps_failing_is_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedDrafter):
        calls = 0

        def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
            self.calls += 1
            raise ValueError("broken")

    drafter = Broken(right(reply_with(TEXT)))
    engine = engine_for(reply_with(TEXT), drafter=drafter, clock=standstill)
    for _ in range(2):
        assert run_one(engine, ask())[1].text == TEXT
    assert drafter.calls == MAX_FAILURES
    texts = [record.getMessage() for record in caplog.records]
    assert ["not used again" in text for text in texts] == [False, True]


@pytest.mark.parametrize("drafts", [[], [Draft(("x",))], [None]])  # type: ignore[arg-type]
def test_drafts_that_break_the_contract_count_as_failures(
    drafts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(ScriptedDrafter):
        def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
            return drafts

    engine = engine_for(reply_with(TEXT), drafter=Odd(right(reply_with(TEXT))), clock=standstill)
    assert run_one(engine, ask())[1].text == TEXT
    assert "the drafter failed" in caplog.text


def test_a_drafter_that_cannot_forget_or_follow_pages_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stuck(ScriptedDrafter):
        def forget(self, request_id: str) -> None:
            raise KeyError(request_id)

        def moved(self, moves: Iterable[tuple[int, int]]) -> None:
            raise KeyError(next(iter(moves)))

    drafter = Stuck(right(reply_with(TEXT)))
    drafting = Drafting(drafter, VOCAB_SIZE, standstill)
    drafting.forget("one")
    drafting.moved([(1, 2)])
    assert "not used again" in caplog.text
    drafting.moved([(1, 2)])
    assert drafting.propose([], lambda _sequence, count: count) == {}
    assert len(caplog.records) == 2


def test_the_drafter_forgets_every_request_that_ends() -> None:
    def rule(history: Sequence[int]) -> Tensor:
        bad = history[0] == 66 and len(history) > 12
        return torch.full((VOCAB_SIZE,), math.nan) if bad else reply_with(TEXT)(history)

    drafter = ScriptedDrafter(right(reply_with(TEXT)), max_tokens=1)
    engine = engine_for(rule, drafter=drafter, clock=standstill)
    run_one(engine, ask(max_tokens=0))
    run_one(engine, ask())
    assert (drafter.num_proposed > 0, drafter.known) == (True, set())
    run_to_failure(engine, ask("BB:"))
    assert not drafter.known
    request = ask()
    engine.submit(request)
    for _ in range(3):
        engine.step()
    assert drafter.known == {request.request_id}
    engine.cancel(request.request_id)
    assert not drafter.known
    (end,) = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert end.drafting is not None
    assert end.drafting.emitted == len(end.token_ids)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    assert isinstance(engine.model, ScriptedModel)
    engine.model.failure = RuntimeError("scripted")
    with pytest.raises(RuntimeError):
        engine.step()
    assert not drafter.known
