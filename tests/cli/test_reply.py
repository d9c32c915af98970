"""One reply after another on one engine: what became of the last is no business of the next."""

from __future__ import annotations

import pytest

from exl_cli.interrupt import Interrupt
from exl_cli.reply import stream_reply
from exl_core.engine.events import FinishReason, TextEvent
from exl_core.errors import BackendError
from support.driving import ask, engine_for
from support.scripted import reply_with


def test_a_pass_that_broke_off_does_not_spoil_the_next_reply() -> None:
    engine = engine_for(reply_with("hello"))
    engine.model.failure = BackendError("no kernel")  # type: ignore[attr-defined]
    with pytest.raises(BackendError):
        stream_reply(engine, ask(), Interrupt(), None)
    written: list[TextEvent] = []
    assert stream_reply(engine, ask(), Interrupt(), written.append).text == "hello"
    assert [event.text for event in written] == list("hello")


def test_an_interrupt_keeps_the_text_so_far() -> None:
    engine = engine_for(reply_with("hello"))
    interrupt = Interrupt()

    def write(event: TextEvent) -> None:
        interrupt.is_set = event.text == "l"

    end = stream_reply(engine, ask(), interrupt, write)
    assert (end.text, end.reason) == ("hel", FinishReason.CANCELLED)


def test_a_reader_that_went_away_leaves_the_engine_empty() -> None:
    engine = engine_for(reply_with("hello"))

    def write(event: TextEvent) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        stream_reply(engine, ask(), Interrupt(), write)
    assert engine.is_idle
    assert not engine.pool.held_pages
