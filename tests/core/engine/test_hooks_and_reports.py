"""Reports on each token, and hooks that may replace it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from exl_core.engine.engine import Engine
from exl_core.engine.events import (
    FailEvent,
    FinishEvent,
    FinishReason,
    RewindEvent,
    SampledToken,
    TextEvent,
)
from exl_core.engine.request import Report
from exl_core.errors import RequestError
from exl_core.ops.open import get_table
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler
from support.driving import ask, engine_for, run_all, run_one, run_to_failure
from support.guessing import ScriptedDrafter, right
from support.scripted import EOS_ID, VOCAB_SIZE, HashRule, always, reply_with

RULE = HashRule(2, spread=1.5)
EVERYTHING = Report(probabilities=True, top_tokens=3, logits=True)
SEEDED = SamplerParams(temperature=0.8, top_k=9, seed=4)


def run(engine: Engine, **rest: Any) -> tuple[list[TextEvent], FinishEvent]:
    engine.submit(ask(**rest))
    *events, end = run_all(engine)
    assert isinstance(end, FinishEvent)
    return [event for event in events if isinstance(event, TextEvent)], end


def reported_tokens(texts: Sequence[TextEvent], end: FinishEvent) -> list[SampledToken]:
    """All reported tokens, after checking that they match the token ids of their events."""
    for event in texts:
        assert tuple(token.token_id for token in event.tokens) == event.token_ids
    tokens = [token for event in texts for token in event.tokens] + list(end.tokens)
    assert tuple(token.token_id for token in tokens) == end.token_ids
    return tokens


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"stop_strings": ("q", "!", "Zz", "\x07")},
        {"banned_strings": ("e", "T", "a0", "\x01")},
        {"stop_ids": frozenset(range(60, 70))},
    ],
    ids=["plain", "held for a stop", "taken back", "stop token"],
)
@pytest.mark.parametrize("has_drafts", [False, True])
def test_reports_equal_the_samplers_distribution(extra: dict[str, Any], has_drafts: bool) -> None:
    drafter = ScriptedDrafter(right(RULE)) if has_drafts else None
    engine = engine_for(RULE, drafter=drafter, clock=lambda: 0.0)
    rest = {"stop_ids": frozenset(), "max_tokens": 40, **extra}
    texts, end = run(engine, sampler=SEEDED, report=EVERYTHING, **rest)
    tokens = reported_tokens(texts, end)
    sampler = Sampler(SEEDED, get_table("reference", threads=1))
    history = list(b"Q:")
    for token in tokens:
        logits = RULE(history)
        assert token.logits is not None
        assert torch.equal(token.logits, logits)
        if "banned_strings" not in extra:  # there, tokens tried before are excluded
            spread = sampler.probabilities(logits, history)
            assert token.probability == pytest.approx(float(spread[token.token_id]), rel=1e-5)
            likeliest = spread.sort(descending=True, stable=True)
            assert [i for i, _ in token.top] == likeliest.indices[:3].tolist()
            top = [p for _, p in token.top]
            assert top == pytest.approx(likeliest.values[:3].tolist(), rel=1e-5)
        history.append(token.token_id)


def test_without_a_report_events_hold_no_details() -> None:
    texts, end = run(engine_for(RULE), max_tokens=5, stop_ids=frozenset())
    assert all(event.tokens == () for event in texts)
    assert end.tokens == ()
    texts, end = run(engine_for(RULE), max_tokens=5, report=Report(top_tokens=2))
    assert {(t.probability, t.logits) for t in reported_tokens(texts, end)} == {(None, None)}


def test_a_stop_token_is_reported_with_the_end_only() -> None:
    engine = engine_for(reply_with("one EN"))
    texts, end = run(engine, stop_strings=("END",), report=Report(probabilities=True))
    assert (texts[-1].text, bytes(texts[-1].token_ids)) == ("EN", b"EN"), "held back until the end"
    assert [token.token_id for token in end.tokens] == [EOS_ID]


def test_tokens_of_a_stop_string_are_reported() -> None:
    texts, end = run(engine_for(reply_with("aSTOP")), stop_strings=("STOP",), report=EVERYTHING)
    assert bytes(t.token_id for t in reported_tokens(texts, end)) == b"aSTOP"
    assert bytes(t.token_id for t in end.tokens) == b"STOP"


def test_removed_tokens_are_not_reported() -> None:
    engine = engine_for(RULE)
    engine.submit(
        ask(banned_strings=("e", "T", "a0"), max_tokens=60, report=EVERYTHING, stop_ids=frozenset())
    )
    *events, end = run_all(engine)
    assert isinstance(end, FinishEvent)
    reported_tokens([event for event in events if isinstance(event, TextEvent)], end)
    assert any(isinstance(event, RewindEvent) for event in events), "or this tested nothing"


@pytest.mark.parametrize("has_drafts", [False, True])
def test_hooks_see_every_token_and_may_replace_it(has_drafts: bool) -> None:
    seen: list[int] = []

    def upper(token: SampledToken) -> int | None:
        seen.append(token.token_id)
        return token.token_id - 32 if 97 <= token.token_id <= 122 else None

    def ends(token: SampledToken) -> int | None:
        assert not 97 <= token.token_id <= 122, "hooks run in order"
        return EOS_ID if token.token_id == ord("D") else None

    rule = reply_with("abcdef")
    drafter = ScriptedDrafter(right(rule)) if has_drafts else None
    engine = engine_for(
        lambda history: rule([i + 32 if 65 <= i <= 90 and i != 81 else i for i in history]),
        drafter=drafter,
        clock=lambda: 0.0,
    )
    texts, end = run(engine, hooks=(upper, ends), report=Report(probabilities=True))
    assert (end.text, end.stopped_by) == ("ABC", EOS_ID)
    assert bytes(seen) == b"abcd", "each once"
    assert [token.probability for token in reported_tokens(texts, end)] == [None] * 4


def test_a_hook_that_returns_the_same_token_changes_nothing() -> None:
    texts, end = run(engine_for(reply_with("ab")), hooks=(lambda t: t.token_id,), report=EVERYTHING)
    assert [token.probability for token in reported_tokens(texts, end)] == [1.0] * 3


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda _: VOCAB_SIZE, "a hook gave no token .*below 258.*258"),
        (lambda _: -1, "a hook gave no token"),
        (lambda _: "x", "a hook gave no token"),
        (lambda _: True, "a hook gave no token .*got True"),
        (lambda _: False, "a hook gave no token .*got False"),
        (lambda _: 104.0, "a hook gave no token .*got 104.0"),
        (lambda _: 1 / 0, "a hook failed .*ZeroDivisionError"),
    ],
)
def test_a_hook_that_fails_ends_its_request_alone(hook: Any, message: str) -> None:
    engine = engine_for(reply_with("hello"))
    other = ask()
    engine.submit(other)
    engine.submit(ask(hooks=(hook,)))
    events = run_all(engine)
    (failure,) = [e for e in events if hasattr(e, "error")]
    with pytest.raises(RequestError, match=message):
        raise failure.error
    end = next(e for e in events if isinstance(e, FinishEvent))
    assert (end.request_id, end.text) == (other.request_id, "hello")
    assert run_one(engine, ask())[1].text == "hello"


def test_a_hook_that_returns_true_does_not_choose_token_1() -> None:
    """Also if token 1 was sampled."""
    request = ask(hooks=(lambda _: True,))
    failure = run_to_failure(engine_for(reply_with(b"\x01")), request)
    assert "a hook gave no token" in str(failure)


def test_an_interrupt_in_a_hook_gives_each_request_one_end() -> None:
    """In the same pass, one request has failed before and one has finished."""

    def interrupt(_: SampledToken) -> None:
        raise KeyboardInterrupt

    engine = engine_for(reply_with("hello"))
    bad, done, broken = ask(hooks=(lambda _: -1,)), ask(max_tokens=1), ask(hooks=(interrupt,))
    for request in (bad, done, broken):
        engine.submit(request)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    ends = [e for e in run_all(engine) if isinstance(e, FailEvent | FinishEvent)]
    assert [e.request_id for e in ends] == [r.request_id for r in (bad, done, broken)]
    errors = [e.error for e in ends if isinstance(e, FailEvent)]
    assert [type(error) for error in errors] == [RequestError, KeyboardInterrupt, KeyboardInterrupt]
    assert run_one(engine, ask())[1].text == "hello"


@pytest.mark.parametrize("mode", ["plain", "drafts", "hybrid"])
def test_a_hook_may_cancel_its_own_request(mode: str) -> None:
    """The reply ends after the token that the hook saw, also if a draft brought more tokens."""
    rule = reply_with("hello")
    drafter = ScriptedDrafter(right(rule)) if mode == "drafts" else None
    engine = engine_for(rule, drafter=drafter, clock=lambda: 0.0, is_hybrid=mode == "hybrid")
    seen: list[int] = []

    def hook(token: SampledToken) -> None:
        seen.append(token.token_id)
        if len(seen) == 3:
            assert engine.cancel("own")

    other = ask()
    engine.submit(other)
    engine.submit(ask(request_id="own", hooks=(hook,)))
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    own = ends["own"]
    assert (own.reason, own.text, own.token_ids) == (FinishReason.CANCELLED, "hel", tuple(b"hel"))
    assert bytes(seen) == b"hel"
    assert ends[other.request_id].text == "hello"
    assert engine.pool.num_available == engine.pool.num_pages


@pytest.mark.parametrize("index", [0, 1], ids=["before", "after"])
def test_a_hook_may_cancel_other_requests(index: int) -> None:
    """One that runs, before or after its token of this step, and one that waits."""
    engine = engine_for(reply_with("hello"), max_batch=2)

    def hook(_: SampledToken) -> None:
        for name in ("running", "waiting"):
            engine.cancel(name)

    requests = [ask(request_id="running")]
    requests.insert(index, ask(request_id="own", hooks=(hook,)))
    for request in (*requests, ask(request_id="waiting")):
        engine.submit(request)
    events = engine.step()
    ends = {e.request_id: e for e in events if isinstance(e, FinishEvent)}
    assert {name: (e.reason, e.text) for name, e in ends.items()} == {
        "running": (FinishReason.CANCELLED, "h"),
        "waiting": (FinishReason.CANCELLED, ""),
    }
    (end,) = [e for e in run_all(engine) if isinstance(e, FinishEvent)]
    assert (end.request_id, end.text) == ("own", "hello")
    assert not engine.cancel("running")


def test_a_request_that_a_hook_cancelled_ends_although_the_step_fails() -> None:
    engine = engine_for(reply_with("hello"), max_batch=1)

    def hook(_: SampledToken) -> None:
        assert engine.cancel("waiting")
        raise KeyboardInterrupt

    engine.submit(ask(request_id="running", hooks=(hook,)))
    engine.submit(ask(request_id="waiting"))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    failed, cancelled = run_all(engine)
    assert isinstance(failed, FailEvent)
    assert isinstance(cancelled, FinishEvent)
    assert cancelled.reason is FinishReason.CANCELLED
    assert run_one(engine, ask())[1].text == "hello"


def test_a_hook_that_calls_step_fails_its_request_alone() -> None:
    engine = engine_for(reply_with("hello"))
    other = ask()
    engine.submit(other)
    engine.submit(ask(hooks=(lambda _: len(engine.step()),)))
    failed, end = [e for e in run_all(engine) if isinstance(e, FailEvent | FinishEvent)]
    assert isinstance(failed, FailEvent)
    assert "a hook called step" in str(failed.error)
    assert isinstance(end, FinishEvent)
    assert (end.request_id, end.text) == (other.request_id, "hello")


def test_a_step_of_another_thread_meanwhile_is_refused() -> None:
    engine = engine_for(reply_with("hello"))
    with ThreadPoolExecutor(1) as other:
        hook = lambda _: len(other.submit(engine.step).result())  # noqa: E731
        error = run_to_failure(engine, ask(hooks=(hook,)))
    assert "another thread runs a step of this engine" in str(error)
    assert run_one(engine, ask())[1].text == "hello"


def test_a_hook_that_repeats_a_banned_token_fails_its_request() -> None:
    engine = engine_for(reply_with("hello"))
    request = ask(hooks=(lambda _: 120,), banned_strings=("xx",))
    assert "a hook insists" in str(run_to_failure(engine, request))


def test_tokens_banned_for_one_step() -> None:
    engine = engine_for(reply_with("ab"))
    request = ask(max_tokens=3)
    engine.submit(request)
    engine.ban_next(request.request_id, frozenset({97}))
    for wrong in (VOCAB_SIZE, -1, True, "a", 97.0):
        with pytest.raises(RequestError, match="a banned token is not in the vocabulary"):
            engine.ban_next(request.request_id, frozenset({wrong}))  # type: ignore[arg-type]
    events = [event for _ in range(2) for event in engine.step()]
    end = [*events, *run_all(engine)][-1]
    assert isinstance(end, FinishEvent)
    assert end.token_ids[0] != 97
    assert end.token_ids[1] == 97, "excluded from the next token only"
    assert end.reason is FinishReason.LENGTH
    for call in (lambda: engine.ban_next("x", frozenset()), lambda: engine.token_ids_of("x")):
        with pytest.raises(RequestError, match="no live request"):
            call()


def test_sampler_state_is_not_shared_between_requests() -> None:
    """Mirostat and DRY, concurrently and in turn, with the same settings object."""
    for sampler in (
        SamplerParams(mirostat_tau=1.5, mirostat_eta=0.5, seed=6),
        SamplerParams(dry_multiplier=3.0, dry_allowed_length=1, dry_base=2.0, seed=6, top_k=3),
    ):
        rest: dict[str, Any] = {"sampler": sampler, "max_tokens": 40, "stop_ids": frozenset()}
        prompts = ["ababab", "cdcd", "ababab"]
        alone = [run_one(engine_for(RULE), ask(p, **rest))[1].token_ids for p in prompts]
        assert alone[0] == alone[2]
        engine = engine_for(RULE)
        after = [run_one(engine, ask(p, **rest))[1].token_ids for p in prompts]
        requests = [ask(p, **rest) for p in prompts]
        for request in requests:
            engine.submit(request)
        ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
        assert after == alone
        assert [ends[request.request_id].token_ids for request in requests] == alone


def test_the_sampler_is_rewound_with_its_reply() -> None:
    """The mirostat cut returns to its value before the removed tokens."""
    logits = torch.full((VOCAB_SIZE,), -30.0)
    logits[97:105] = torch.linspace(1, 0, 8)
    params = SamplerParams(mirostat_tau=2.5, mirostat_eta=0.9, seed=5)
    request = ask(sampler=params, banned_strings=("bc", "ad"), max_tokens=60, stop_ids=frozenset())
    engine = engine_for(always(logits))
    engine.submit(request)
    *events, end = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert sum(isinstance(event, RewindEvent) for event in events) > 3, "or this tested nothing"
    sampler = Sampler(params, get_table("reference", threads=1))
    history = list(b"Q:")
    tried: dict[int, set[int]] = {}
    while len(history) < 62:
        banned = tried.get(len(history), set())
        sample = sampler.sample(logits, history, banned=banned)
        sampler.accept(sample)
        history.append(sample.token_id)
        if bytes(history[-2:]) in (b"bc", b"ad"):
            place = len(history) - 2
            tried = {at: ids for at, ids in tried.items() if at <= place}
            tried.setdefault(place, set()).add(history[place])
            del history[place:]
            sampler.rewind(place)
    assert end.token_ids == tuple(history[2:])
