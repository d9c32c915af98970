"""`stream_reply`: a failed or cancelled reply does not affect the next one on the same engine."""

from __future__ import annotations

import pytest

from exl_cli.interrupt import Interrupt
from exl_cli.reply import stream_reply
from exl_core.engine.events import FinishReason, TextEvent
from exl_core.errors import BackendError
from support.driving import ask, engine_for
from support.scripted import reply_with


def test_failed_pass_does_not_affect_the_next_reply() -> None:
    engine = engine_for(reply_with("hello"))
    engine.model.failure = BackendError("no kernel")  # type: ignore[attr-defined]
    with pytest.raises(BackendError):
        stream_reply(engine, ask(), Interrupt(), None)
    written: list[TextEvent] = []
    assert stream_reply(engine, ask(), Interrupt(), written.append).text == "hello"
    assert [event.text for event in written] == list("hello")


def test_interrupt_keeps_the_partial_text() -> None:
    engine = engine_for(reply_with("hello"))
    interrupt = Interrupt()

    def write(event: TextEvent) -> None:
        interrupt.is_set = event.text == "l"

    end = stream_reply(engine, ask(), interrupt, write)
    assert (end.text, end.reason) == ("hel", FinishReason.CANCELLED)


def test_broken_pipe_leaves_the_engine_idle() -> None:
    engine = engine_for(reply_with("hello"))

    def write(event: TextEvent) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        stream_reply(engine, ask(), Interrupt(), write)
    assert engine.is_idle
    assert not engine.pool.held_pages
