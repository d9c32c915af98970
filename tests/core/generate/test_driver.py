"""`stream` and `generate`: one request on an idle engine."""

from __future__ import annotations

import pytest

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent, TextEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.driver import generate, stream
from exl_core.sampling.params import SamplerParams
from support.scripted import EOS_ID, ByteTokenizer, ScriptedModel, reply_with


def make_engine() -> tuple[Engine, ScriptedModel]:
    model = ScriptedModel(reply_with("hello"))
    return Engine(model, ByteTokenizer(), EngineOptions(cache_tokens=512)), model


def ask(request_id: str = "mine", prompt: bytes = b"Q:") -> Request:
    return Request(
        tuple(prompt),
        sampler=SamplerParams(temperature=0),
        stop_ids=frozenset({EOS_ID}),
        request_id=request_id,
    )


def test_stream_yields_text_events_and_ends_with_the_whole_text() -> None:
    engine, _ = make_engine()
    events = list(stream(engine, ask()))
    assert [e.text for e in events if isinstance(e, TextEvent)] == list("hello")
    assert isinstance(events[-1], FinishEvent)
    assert events[-1].text == "hello"
    assert engine.is_idle


def test_generate_returns_the_whole_text() -> None:
    engine, _ = make_engine()
    assert generate(engine, ask()).text == "hello"
    assert generate(engine, ask()).text == "hello", "an id is free again once its request has ended"


def test_a_bad_request_is_refused_at_the_call() -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="do not fit"):
        stream(engine, ask(prompt=b"x" * 600))


def test_an_unread_stream_submits_no_request() -> None:
    engine, model = make_engine()
    stream(engine, ask())
    assert engine.is_idle
    assert generate(engine, ask()).text == "hello"
    assert len(model.rows_of_pass) == 6


def test_closing_the_stream_cancels_the_request() -> None:
    engine, _ = make_engine()
    events = stream(engine, ask())
    assert next(events).text == "h"
    events.close()  # type: ignore[attr-defined]
    assert engine.is_idle
    assert not engine.pool.held_pages
    assert generate(engine, ask()).text == "hello"


def test_a_busy_engine_is_refused() -> None:
    engine, _ = make_engine()
    engine.submit(ask("other"))
    with pytest.raises(RequestError, match="busy") as caught:
        generate(engine, ask())
    assert caught.value.got == "other"
    events = [event for _ in range(6) for event in engine.step()]
    assert {e.request_id for e in events} == {"other"}
    assert generate(engine, ask()).text == "hello"
