"""Constraints in the engine: allowed tokens, ends of replies, and failures of one request."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.constrain.choice import OneOf, StartsWith
from exl_core.constrain.filter import Filter
from exl_core.constrain.foreign import Foreign
from exl_core.constrain.grammar import Grammar
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.engine.events import FailEvent, FinishEvent, FinishReason, SampledToken
from exl_core.engine.request import HookedToken
from exl_core.errors import ConstraintError, RequestError
from exl_core.sampling.params import SamplerParams
from support.driving import ask, engine_for, run_all, run_one, run_to_failure, submit
from support.scripted import EOS_ID, VOCAB_SIZE, HashRule, Rule, always, certain, reply_with

CONSTRAINT, STOP, LENGTH = FinishReason.CONSTRAINT, FinishReason.STOP, FinishReason.LENGTH


def ranking(*ids: int) -> Rule:
    """Rule that always ranks these ids first, in this order."""
    logits = torch.full((VOCAB_SIZE,), -30.0)
    for rank, token_id in enumerate(ids):
        logits[token_id] = 30.0 - rank
    return always(logits)


@dataclass
class Recording(Filter):
    """Allows one token, `count` times, and records the accepted tokens."""

    token_id: int
    count: int
    gate: threading.Event | None = None
    accepted: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    vocabulary: Vocabulary | None = None

    def filter(self, vocabulary: Vocabulary) -> Recording:
        self.vocabulary = vocabulary
        return self

    def mask(self) -> Tensor:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(10), "the pass never started"
        assert self.vocabulary is not None
        return self.vocabulary.mask_of([self.token_id] if len(self.accepted) < self.count else [])

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def rewind(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) == self.count

    @property
    def is_finished(self) -> bool:
        return False


def test_the_reply_ends_when_the_constraint_is_finished() -> None:
    _, end = run_one(engine_for(ranking(121, 120)), ask(constraints=(OneOf(["xyz", "xy!"]),)))
    assert (end.text, end.reason, end.stopped_by) == ("xy!", CONSTRAINT, None)
    assert end.token_ids == tuple(b"xy!")
    _, end = run_one(engine_for(ranking(49)), ask(constraints=(Regex("[0-9]{3}"),), max_tokens=3))
    assert (end.text, end.reason) == ("111", CONSTRAINT), (
        "the constraint takes precedence over the length"
    )


def test_eos_is_allowed_only_after_complete_text() -> None:
    _, end = run_one(engine_for(ranking(EOS_ID, 97)), ask(constraints=(Regex("aaa+b?"),)))
    assert (end.text, end.stopped_by) == ("aaa", EOS_ID)
    _, end = run_one(engine_for(ranking(EOS_ID)), ask(constraints=(StartsWith("abc"),)))
    assert (end.text, end.stopped_by) == ("abc", EOS_ID)


def test_prefer_eos_ends_the_reply_as_soon_as_allowed() -> None:
    rule = ranking(97, EOS_ID)
    constraints = (Regex("a{2,9}"),)
    _, end = run_one(engine_for(rule), ask(constraints=constraints))
    assert (end.text, end.reason) == ("a" * 9, CONSTRAINT)
    _, end = run_one(engine_for(rule), ask(constraints=constraints, prefer_eos=True))
    assert (end.text, end.stopped_by) == ("aa", EOS_ID)


@pytest.mark.parametrize("prefer_eos", [False, True])
def test_min_tokens_takes_precedence_over_an_allowed_end(prefer_eos: bool) -> None:
    request = ask(constraints=(Regex("a{2,9}"),), prefer_eos=prefer_eos, min_tokens=4)
    _, end = run_one(engine_for(ranking(EOS_ID, 97)), request)
    assert (end.text, end.stopped_by) == ("aaaa", EOS_ID)


def test_all_constraints_hold_at_once() -> None:
    both = (Regex("[a-f]+"), Regex("[d-k]+"), StartsWith(["e", "g"]))
    _, end = run_one(engine_for(ranking(97, 107, 102, 101)), ask(constraints=both, max_tokens=3))
    assert (end.text, end.reason) == ("eff", LENGTH)


def test_json_from_random_logits() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    closed = {**schema, "additionalProperties": False}
    for seed in range(3):
        request = ask(
            constraints=(JsonSchema(closed),), sampler=SamplerParams(seed=seed), max_tokens=200
        )
        _, end = run_one(engine_for(HashRule(seed)), request)
        assert "".join(end.text.split()) in ('{"ok":true}', '{"ok":false}')


class CountDown:
    """Filter in the interface of another library: three digits, the last one ends the reply."""

    def begin(self, prefix_str: str) -> None:
        assert prefix_str == ""
        self.left = 3

    def feed(self, token: Tensor) -> None:
        assert token.shape == (1, 1)
        self.left -= 1

    def next(self) -> tuple[set[int], set[int]]:
        if self.left == 0:
            raise RuntimeError("called after the end")
        digits = {48 + self.left}
        return digits, digits if self.left == 1 else set()


def test_a_filter_of_another_library() -> None:
    foreign = Foreign(CountDown())
    engine = engine_for(ranking(97))
    for _ in range(2):
        _, end = run_one(engine, ask(constraints=(foreign,)))
        assert (end.text, end.reason) == ("321", CONSTRAINT)


def test_a_failing_filter_of_another_library_ends_its_request_alone() -> None:
    class Broken(CountDown):
        def feed(self, token: Tensor) -> None:
            raise ValueError("broken")

    engine = engine_for(reply_with("hello"))
    good, bad = ask(), ask(constraints=(Foreign(Broken()),))
    submit(engine, bad)
    submit(engine, good)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FailEvent | FinishEvent)}
    failure, end = ends[bad.request_id], ends[good.request_id]
    assert isinstance(failure, FailEvent)
    assert isinstance(failure.error, ConstraintError)
    assert "Broken failed in feed" in str(failure.error)
    assert isinstance(end, FinishEvent)
    assert end.text == "hello"


def test_contradicting_constraints_fail_one_request_only() -> None:
    engine = engine_for(reply_with("hello"))
    good, bad = ask(), ask(constraints=(Regex("aab"), Regex("aac")))
    submit(engine, good)
    submit(engine, bad)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FailEvent | FinishEvent)}
    failure, end = ends[bad.request_id], ends[good.request_id]
    assert isinstance(failure, FailEvent)
    assert isinstance(failure.error, ConstraintError)
    assert "token 2 of the reply" in str(failure.error)
    assert isinstance(end, FinishEvent)
    assert end.text == "hello"
    assert run_one(engine, ask())[1].text == "hello"


@pytest.mark.parametrize("constraint", [Regex("a("), JsonSchema({"type": "nothing"}), Regex("[")])
def test_invalid_constraints_are_refused_at_the_call(constraint: Any) -> None:
    engine = engine_for(reply_with("hello"))
    with pytest.raises(ConstraintError):
        engine.compile(ask(constraints=(constraint,)))
    assert engine.is_idle
    assert run_one(engine, ask())[1].text == "hello"


def test_a_mask_that_is_too_much_work_ends_its_request_alone() -> None:
    """The items of an ambiguous grammar grow with every token, until a limit of the library."""
    ambiguous = Grammar("start: a*\na: b*\nb: c*\nc: /[a-z]/ | a a a")
    engine = engine_for(ranking(97))
    good, bad = ask(max_tokens=60), ask(constraints=(ambiguous,), max_tokens=500)
    submit(engine, good)
    submit(engine, bad)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FailEvent | FinishEvent)}
    failure, end = ends[bad.request_id], ends[good.request_id]
    assert isinstance(failure, FailEvent)
    assert isinstance(failure.error, ConstraintError)
    assert "became too complex" in str(failure.error)
    assert isinstance(end, FinishEvent)
    assert end.text == "a" * 60


def test_submit_refuses_constraints_that_are_not_compiled() -> None:
    engine = engine_for(ranking(97))
    request = ask(constraints=(Regex("aa"),))
    with pytest.raises(RequestError, match="constraints are not compiled"):
        engine.submit(request)
    assert engine.is_idle
    engine.submit(request, engine.compile(request))
    assert isinstance(run_all(engine)[-1], FinishEvent)


def test_a_request_that_cannot_be_served_is_refused_before_its_constraints_are_compiled() -> None:
    class Unreached:
        def filter(self, vocabulary: Vocabulary) -> Filter:
            raise AssertionError

    engine = engine_for(ranking(97), max_seq_len=20)
    with pytest.raises(RequestError, match="20"):
        engine.compile(ask("x" * 30, constraints=(Unreached(),)))


def test_masks_are_computed_during_the_forward_pass() -> None:
    """The mask waits until the pass has begun: computing one after the other would deadlock."""
    gate = threading.Event()
    recording = Recording(97, 3, gate=gate)

    def rule(history: Sequence[int]) -> Tensor:
        gate.set()
        return certain(EOS_ID)

    _, end = run_one(engine_for(rule), ask(constraints=(recording,)))
    assert end.text == "aaa"
    assert all(name.startswith("exl-constraints") for name in recording.threads)


def test_a_filter_accepts_exactly_the_tokens_of_the_reply() -> None:
    recording = Recording(97, 4)
    request = ask(constraints=(recording,), stop_strings=("aaa",))
    _, end = run_one(engine_for(ranking(EOS_ID)), request)
    assert (end.text, end.stopped_by, recording.accepted) == ("", "aaa", [97] * 3)
    recording = Recording(97, 4)
    _, end = run_one(engine_for(ranking(EOS_ID)), ask(constraints=(recording,)))
    assert (end.text, recording.accepted) == ("aaaa", [97] * 4), "filters never see EOS"


@pytest.mark.parametrize("way", ["cancel", "failure"])
def test_a_request_may_end_while_its_mask_is_computed(way: str) -> None:
    """The engine does not wait for that mask; masks of the next request are computed after it."""
    engine = engine_for(reply_with("hello"))
    gate = threading.Event()
    slow = Recording(97, 3, gate=gate)
    request = ask(constraints=(slow,))
    submit(engine, request)
    engine.model.failure = RuntimeError("scripted")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        engine.step()
    if way == "cancel":
        assert not engine.cancel(request.request_id), "it has failed already"
        other = ask(constraints=(Recording(98, 2),))
        submit(engine, other)
        assert engine.cancel(other.request_id)
    gate.set()
    assert [type(e) for e in run_all(engine)].count(FailEvent) == 1
    _, end = run_one(engine, ask(constraints=(OneOf(["xy"]),)))
    assert end.text == "xy"


def test_the_mask_thread_ends_with_the_engine() -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("exl-constraints")}

    before = threads()
    engine = engine_for(ranking(97))
    run_one(engine, ask())
    assert threads() <= before, "no thread before the first constraint"
    run_one(engine, ask(constraints=(OneOf(["xy"]),)))
    (worker,) = threads() - before
    del engine
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()


def test_a_token_that_a_hook_keeps_from_the_filters_does_not_advance_them() -> None:
    calls = []

    def hook(token: SampledToken) -> HookedToken | None:
        calls.append(token.token_id)
        return HookedToken(ord("z"), feeds_filters=False) if len(calls) == 2 else None

    request = ask(constraints=(OneOf(["abc"]),), hooks=(hook,))
    assert run_one(engine_for(ranking(97)), request)[1].text == "azbc"
    assert bytes(calls).decode() == "abbc", "the second token is sampled again"


def test_a_token_outside_the_filters_is_rewound_with_a_banned_string() -> None:
    calls = []

    def hook(token: SampledToken) -> HookedToken | None:
        calls.append(token.token_id)
        return HookedToken(ord("z"), feeds_filters=False) if len(calls) == 2 else None

    request = ask(constraints=(OneOf(["abc", "xbc"]),), hooks=(hook,), banned_strings=("azb",))
    assert run_one(engine_for(ranking(97)), request)[1].text == "xbc"


def test_a_hook_that_breaks_the_constraint_ends_the_request() -> None:
    engine = engine_for(ranking(97))
    request = ask(constraints=(OneOf(["abc"]),), hooks=(lambda _: 122,))
    assert isinstance(run_to_failure(engine, request), ConstraintError)
    assert run_one(engine, ask(max_tokens=2))[1].text == "aa"
