"""Display of a streaming reply: reasoning in one line, no control characters from the model."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from exl_cli.chat import screen
from exl_cli.chat.screen import ReplyScreen


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Captured stderr, as on a terminal with 20 columns."""
    seen = io.StringIO()
    console = Console(file=seen, force_terminal=True, width=20, highlight=False)
    monkeypatch.setattr(screen, "stderr_console", lambda: console)
    return seen


def test_reasoning_is_shown_as_a_token_count_in_one_line(
    notes: io.StringIO, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    reply = ReplyScreen(shows_reasoning=False)
    for _ in range(7):
        reply.think("so ", 2)
    reply.say("\n\nYes.")
    reply.close()
    seen = re.sub(r"\x1b\[[0-9;]*[mK]", "", notes.getvalue())
    *counts, last = seen.split("\r")[1:]
    assert [line.split()[1] for line in counts] == ["2", "4", "6", "8", "10", "12", "14"]
    assert all(len(line) < 20 for line in counts)
    assert last.startswith("thought for 14")
    assert seen.count("\n") == 1
    assert capfd.readouterr().out == "Yes.\n"


def test_prefill_progress_is_shown_until_the_first_text(
    notes: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    reply = ReplyScreen(shows_reasoning=False)
    reply.read(512, 2000)
    reply.read(1024, 2000)
    reply.say("Yes")
    reply.read(
        512, 3000
    )  # a second prefill, after the context was full, must not draw over the reply
    reply.close()
    assert notes.getvalue().split("\r\x1b[K")[1:3] == [
        "\x1b[2mreading... 512 of 2\x1b[0m",
        "\x1b[2mreading... 1024 of \x1b[0m",
    ]
    assert notes.getvalue().endswith("\r\x1b[K")
    quiet = ReplyScreen(shows_reasoning=False, is_quiet=True)
    seen = notes.getvalue()
    quiet.read(512, 2000)
    assert notes.getvalue() == seen
    assert capfd.readouterr().out == "Yes\n"


def test_reasoning_shown_in_full(notes: io.StringIO, capfd: pytest.CaptureFixture[str]) -> None:
    reply = ReplyScreen(shows_reasoning=True)
    reply.think("Is it [bold]? \x1b[2J", 1)
    reply.say("Yes.")
    reply.close()
    seen = re.sub(r"\x1b\[[0-9;]*m", "", notes.getvalue())
    assert seen == "Is it [bold]? [2J\n\n"
    assert capfd.readouterr().out == "Yes.\n"


def test_stdout_that_is_not_a_terminal_gets_the_raw_reply(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reply = ReplyScreen(shows_reasoning=False)
    reply.say("a \x1b[31m **b**")
    reply.close()
    assert capfd.readouterr().out == "a \x1b[31m **b**\n"
