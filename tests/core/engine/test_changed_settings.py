"""Sampler settings and stop conditions of a live request, changed between steps; shared stores."""

from __future__ import annotations

import pytest
import torch

from exl_core.constrain.regex import Regex
from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishEvent, SampledToken, TextEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from support.driving import ask, engine_for, run_all, submit
from support.guessing import ScriptedDrafter, right
from support.scripted import (
    BOS_ID,
    EOS_ID,
    VOCAB_SIZE,
    ByteTokenizer,
    HashRule,
    always,
    reply_with,
)

PROMPT = tuple(b"hello")
GREEDY = SamplerParams(temperature=0.0)


def steps(engine: Engine, count: int) -> list[int]:
    return [
        token
        for _ in range(count)
        for event in engine.step()
        if isinstance(event, TextEvent)
        for token in event.token_ids
    ]


def test_settings_apply_from_the_next_token_on() -> None:
    engine = engine_for(HashRule(3))
    greedy = Request(PROMPT, max_tokens=8, sampler=GREEDY)
    plain = engine.submit(greedy)
    run_all(engine)
    first = plain.token_ids[len(PROMPT) : len(PROMPT) + 4]

    request = Request(PROMPT, max_tokens=8, sampler=SamplerParams(allowed_tokens=frozenset((65,))))
    sequence = engine.submit(request)
    engine.step()
    engine.step()
    engine.set_sampler(request.request_id, GREEDY)
    run_all(engine)
    reply = sequence.token_ids[len(PROMPT) :]
    assert reply[:2] == [65, 65]
    assert reply[2:] != [65] * 6
    assert first != reply[:4]


def test_the_random_stream_continues_after_a_change() -> None:
    engine = engine_for(HashRule(3))
    plain = Request(PROMPT, max_tokens=12, sampler=SamplerParams(seed=5))
    expected = engine.submit(plain)
    run_all(engine)
    changed = Request(PROMPT, max_tokens=12, sampler=SamplerParams(seed=5))
    sequence = engine.submit(changed)
    for number in range(4):
        engine.step()
        engine.set_sampler(changed.request_id, SamplerParams(seed=number))
    run_all(engine)
    assert sequence.token_ids == expected.token_ids


def test_a_changed_rate_of_mirostat_applies_from_the_next_token_on() -> None:
    """The cut stays, and moves by the new rate afterwards."""

    def cuts(rates: list[float]) -> list[float | None]:
        engine = engine_for(HashRule(3))
        tau, eta = 3.0, 0.2
        sampler = SamplerParams(mirostat_tau=tau, mirostat_eta=eta, seed=5)
        request = Request(PROMPT, max_tokens=len(rates) + 1, sampler=sampler)
        engine.submit(request)
        found = []
        for rate in rates:
            engine.step()
            found.append(engine.mirostat_cut(request.request_id))
            changed = SamplerParams(mirostat_tau=tau, mirostat_eta=rate)
            engine.set_sampler(request.request_id, changed)
        run_all(engine)
        return found

    kept, stopped = cuts([0.2] * 6), cuts([0.2, 0.2, 0.0, 0.0, 0.0, 0.0])
    assert len(set(kept)) == 6
    assert stopped == kept[:3] + [kept[2]] * 3


def test_stops_apply_to_held_text_too() -> None:
    engine = engine_for(HashRule(3))
    whole = Request(PROMPT, max_tokens=20, sampler=GREEDY)
    engine.submit(whole)
    (end,) = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    stop = end.text[6:8]
    request = Request(
        PROMPT, max_tokens=20, sampler=GREEDY, stop_strings=(end.text[2:4] + "\0never",)
    )
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.set_stops(request.request_id, (), (stop,))
    (stopped,) = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    assert stopped.stopped_by == stop
    assert stopped.text == end.text[: end.text.index(stop)]


@pytest.mark.parametrize("prefer_eos", [False, True])
def test_changed_stop_tokens_end_a_constrained_reply(prefer_eos: bool) -> None:
    """The earlier one is no longer allowed: the constraint has no such text."""
    logits = torch.full((VOCAB_SIZE,), -30.0)
    logits[[EOS_ID, BOS_ID, ord("a")]] = torch.tensor([3.0, 2.0, 1.0])
    engine = engine_for(always(logits))
    request = ask(constraints=(Regex("a{2,9}"),), prefer_eos=prefer_eos)
    submit(engine, request)
    engine.step()
    engine.set_stops(request.request_id, (BOS_ID,), ())
    (end,) = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    assert (end.text, end.stopped_by) == ("aa", BOS_ID)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_hook_changes_stop_tokens_from_the_next_token_on(has_drafts: bool) -> None:
    """The token that the hook saw was sampled under the earlier ones, in both requests. Text of
    both reaches the constraint."""
    rule = reply_with("ab!")
    drafter = ScriptedDrafter(right(rule)) if has_drafts else None
    engine = engine_for(rule, drafter=drafter, clock=lambda: 0.0)
    constraints = (Regex("ab!?"),)
    other = ask(constraints=constraints)

    def hook(token: SampledToken) -> None:
        for name in ("own", other.request_id):
            if token.token_id == ord("b"):
                engine.set_stops(name, (ord("b"), ord("!")), ())

    submit(engine, ask(request_id="own", constraints=constraints, hooks=(hook,)))
    submit(engine, other)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    assert [ends[name].text for name in ("own", other.request_id)] == ["ab", "ab"]
    assert [ends[name].stopped_by for name in ("own", other.request_id)] == [ord("!")] * 2


@pytest.mark.parametrize(
    "params", [SamplerParams(cfg_scale=1.5), SamplerParams(banned_tokens=frozenset((10**6,)))]
)
def test_settings_that_the_request_cannot_have_are_refused(params: SamplerParams) -> None:
    engine = engine_for(HashRule(3))
    request = Request(PROMPT, max_tokens=4)
    engine.submit(request)
    with pytest.raises(RequestError):
        engine.set_sampler(request.request_id, params)
    run_all(engine)
    with pytest.raises(RequestError, match="no live request"):
        engine.set_sampler(request.request_id, GREEDY)


def test_two_engines_take_turns_on_one_store() -> None:
    first = engine_for(HashRule(3))
    second = Engine(first.model, ByteTokenizer(), store=first.store)
    assert second.store is first.store
    assert second.pool.num_pages == first.pool.num_pages
    replies = []
    for engine in (first, second, first):
        engine.forget_cache()
        sequence = engine.submit(Request(PROMPT, max_tokens=6, sampler=GREEDY))
        run_all(engine)
        replies.append(sequence.token_ids)
    assert replies[0] == replies[1] == replies[2]
