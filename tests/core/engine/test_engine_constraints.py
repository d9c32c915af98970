"""Constraints in the engine: what may come, when the reply ends, and who fails if nothing may."""

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
from exl_core.constrain.filter import ConstraintError, Filter
from exl_core.constrain.foreign import Foreign
from exl_core.constrain.grammar import Grammar
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.engine.events import FailEvent, FinishEvent, FinishReason
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from support.driving import ask, engine_for, run_all, run_one, run_to_failure, submit
from support.scripted import EOS_ID, VOCAB_SIZE, HashRule, Rule, always, certain, reply_with

CONSTRAINT, STOP, LENGTH = FinishReason.CONSTRAINT, FinishReason.STOP, FinishReason.LENGTH


def eager(*ids: int) -> Rule:
    """The first of these is wanted most, and always."""
    logits = torch.full((VOCAB_SIZE,), -30.0)
    for rank, token_id in enumerate(ids):
        logits[token_id] = 30.0 - rank
    return always(logits)


@dataclass
class Watched(Filter):
    """Lets one token come, `count` times; keeps a record of what it was told."""

    token_id: int
    count: int
    gate: threading.Event | None = None
    told: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    vocabulary: Vocabulary | None = None

    def filter(self, vocabulary: Vocabulary) -> Watched:
        self.vocabulary = vocabulary
        return self

    def mask(self) -> Tensor:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(10), "the pass never came"
        assert self.vocabulary is not None
        return self.vocabulary.mask_of([self.token_id] if len(self.told) < self.count else [])

    def accept(self, token_id: int) -> None:
        self.told.append(token_id)

    def rewind(self, count: int) -> None:
        del self.told[len(self.told) - count :]

    @property
    def is_complete(self) -> bool:
        return len(self.told) == self.count

    @property
    def is_finished(self) -> bool:
        return False


def test_the_reply_ends_where_nothing_can_follow() -> None:
    _, end = run_one(engine_for(eager(121, 120)), ask(constraints=(OneOf(["xyz", "xy!"]),)))
    assert (end.text, end.reason, end.stopped_by) == ("xy!", CONSTRAINT, None)
    assert end.token_ids == tuple(b"xy!")
    _, end = run_one(engine_for(eager(49)), ask(constraints=(Regex("[0-9]{3}"),), max_tokens=3))
    assert (end.text, end.reason) == ("111", CONSTRAINT), "it has the better reason"


def test_eos_comes_only_when_the_text_is_complete() -> None:
    _, end = run_one(engine_for(eager(EOS_ID, 97)), ask(constraints=(Regex("aaa+b?"),)))
    assert (end.text, end.stopped_by) == ("aaa", EOS_ID)
    _, end = run_one(engine_for(eager(EOS_ID)), ask(constraints=(StartsWith("abc"),)))
    assert (end.text, end.stopped_by) == ("abc", EOS_ID)


def test_prefer_eos_ends_it_as_soon_as_it_may() -> None:
    rule = eager(97, EOS_ID)
    constraints = (Regex("a{2,9}"),)
    _, end = run_one(engine_for(rule), ask(constraints=constraints))
    assert (end.text, end.reason) == ("a" * 9, CONSTRAINT)
    _, end = run_one(engine_for(rule), ask(constraints=constraints, prefer_eos=True))
    assert (end.text, end.stopped_by) == ("aa", EOS_ID)


@pytest.mark.parametrize("prefer_eos", [False, True])
def test_min_tokens_come_before_an_end_that_is_allowed(prefer_eos: bool) -> None:
    request = ask(constraints=(Regex("a{2,9}"),), prefer_eos=prefer_eos, min_tokens=4)
    _, end = run_one(engine_for(eager(EOS_ID, 97)), request)
    assert (end.text, end.stopped_by) == ("aaaa", EOS_ID)


def test_all_constraints_hold_at_once() -> None:
    both = (Regex("[a-f]+"), Regex("[d-k]+"), StartsWith(["e", "g"]))
    _, end = run_one(engine_for(eager(97, 107, 102, 101)), ask(constraints=both, max_tokens=3))
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
    """As it was written for another library: three digits, the last one ends the reply."""

    def begin(self, prefix_str: str) -> None:
        assert prefix_str == ""
        self.left = 3

    def feed(self, token: Tensor) -> None:
        assert token.shape == (1, 1)
        self.left -= 1

    def next(self) -> tuple[set[int], set[int]]:
        if self.left == 0:
            raise RuntimeError("nobody should ask")
        digits = {48 + self.left}
        return digits, digits if self.left == 1 else set()


def test_a_foreign_filter() -> None:
    foreign = Foreign(CountDown())
    engine = engine_for(eager(97))
    for _ in range(2):
        _, end = run_one(engine, ask(constraints=(foreign,)))
        assert (end.text, end.reason) == ("321", CONSTRAINT)


def test_a_foreign_filter_that_breaks_ends_its_request_alone() -> None:
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


def test_where_nothing_is_left_one_request_fails_and_the_engine_goes_on() -> None:
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
def test_what_cannot_be_met_is_refused_at_the_call(constraint: Any) -> None:
    engine = engine_for(reply_with("hello"))
    with pytest.raises(ConstraintError):
        engine.compile(ask(constraints=(constraint,)))
    assert engine.is_idle
    assert run_one(engine, ask())[1].text == "hello"


def test_a_mask_that_is_too_much_work_ends_its_request_alone() -> None:
    """The items of an ambiguous grammar grow with every token, until a limit of the library."""
    ambiguous = Grammar("start: a*\na: b*\nb: c*\nc: /[a-z]/ | a a a")
    engine = engine_for(eager(97))
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
    engine = engine_for(eager(97))
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

    engine = engine_for(eager(97), max_seq_len=20)
    with pytest.raises(RequestError, match="20"):
        engine.compile(ask("x" * 30, constraints=(Unreached(),)))


def test_masks_are_computed_while_the_pass_runs() -> None:
    """The mask is held back until the pass has begun: one after the other would never end."""
    gate = threading.Event()
    watched = Watched(97, 3, gate=gate)

    def rule(history: Sequence[int]) -> Tensor:
        gate.set()
        return certain(EOS_ID)

    _, end = run_one(engine_for(rule), ask(constraints=(watched,)))
    assert end.text == "aaa"
    assert all(name.startswith("exl-constraints") for name in watched.threads)


def test_a_filter_is_told_what_stayed_and_nothing_else() -> None:
    watched = Watched(97, 4)
    request = ask(constraints=(watched,), stop_strings=("aaa",))
    _, end = run_one(engine_for(eager(EOS_ID)), request)
    assert (end.text, end.stopped_by, watched.told) == ("", "aaa", [97] * 3)
    watched = Watched(97, 4)
    _, end = run_one(engine_for(eager(EOS_ID)), ask(constraints=(watched,)))
    assert (end.text, watched.told) == ("aaaa", [97] * 4), "EOS is no filter's business"


@pytest.mark.parametrize("way", ["cancel", "failure"])
def test_an_end_while_a_mask_is_on_its_way(way: str) -> None:
    """Nobody waits for it, and the next request's masks come after it."""
    engine = engine_for(reply_with("hello"))
    gate = threading.Event()
    slow = Watched(97, 3, gate=gate)
    request = ask(constraints=(slow,))
    submit(engine, request)
    engine.model.failure = RuntimeError("scripted")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        engine.step()
    if way == "cancel":
        assert not engine.cancel(request.request_id), "it has failed already"
        other = ask(constraints=(Watched(98, 2),))
        submit(engine, other)
        assert engine.cancel(other.request_id)
    gate.set()
    assert [type(e) for e in run_all(engine)].count(FailEvent) == 1
    _, end = run_one(engine, ask(constraints=(OneOf(["xy"]),)))
    assert end.text == "xy"


def test_the_thread_goes_with_the_engine() -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("exl-constraints")}

    before = threads()
    engine = engine_for(eager(97))
    run_one(engine, ask())
    assert threads() <= before, "none before it is needed"
    run_one(engine, ask(constraints=(OneOf(["xy"]),)))
    (worker,) = threads() - before
    del engine
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()


def test_a_hook_that_breaks_the_constraint_ends_the_request() -> None:
    engine = engine_for(eager(97))
    request = ask(constraints=(OneOf(["abc"]),), hooks=(lambda _: 122,))
    assert isinstance(run_to_failure(engine, request), ConstraintError)
    assert run_one(engine, ask(max_tokens=2))[1].text == "aa"
