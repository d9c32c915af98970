"""`exl chat` on a pseudo-terminal, with the default model."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import Command
from support.terminal import Terminal, without_colors

pytestmark = pytest.mark.thorough

PASTE = "\x1b[200~{}\x1b[201~"
TALE = "Write a very long story about a dragon."

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*args, **environment)`: a chat that waits for its first message."""
    started: list[Terminal] = []

    def chat(*args: str, **env: str) -> Terminal:
        terminal = Terminal(
            "chat", "--temp", "0", *args, env={"XDG_STATE_HOME": str(tmp_path), **env}
        )
        started.append(terminal)
        terminal.expect("Ctrl-D leaves")
        terminal.expect(">>>")
        return terminal

    yield chat
    for terminal in started:
        terminal.close()


def leave(chat: Terminal) -> str:
    """Wait for the prompt, end the chat with Ctrl-D, check its exit code. Returns all output
    without colors."""
    chat.expect(">>>")
    chat.type("\x04")
    assert chat.wait() == 0
    seen = without_colors(chat.seen)
    assert "Traceback" not in seen
    return seen


def test_type_interrupt_paste_and_quit(start: Start, tmp_path: Path) -> None:
    chat = start()
    chat.type(TALE + "\r")
    chat.expect(r"dragon\.[^\n]*\n")
    chat.expect(r"[A-Za-z]{3}")  # the reply streams
    chat.resize(20, 30)
    chat.expect(r"[A-Za-z]{3}")
    chat.type("\x03")
    chat.expect("Stopped")
    chat.expect(">>>")
    chat.type("half a line\x03")
    chat.expect("Ctrl-D leaves")
    chat.expect(">>>")
    chat.type("/stats\r")
    chat.expect("Speed is shown")
    chat.resize(24, 80)
    chat.type("/set max-response-tokens 5\r")
    chat.expect("is now 5")
    chat.expect(">>>")
    chat.type(PASTE.format("Say:\n/bye\nhello."))
    chat.type("\r")  # only this return sends the message
    chat.expect(r"reply 5 tokens at [0-9.]+ tok/s")
    chat.expect(">>>")
    path = tmp_path / "chat.json"
    chat.type(f"/save {path}\r")
    chat.expect("2 turns")
    leave(chat)

    turns = json.loads(path.read_text(encoding="utf-8"))["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    assert turns[0]["content"] == TALE
    assert turns[1]["content"]  # the reply up to Ctrl-C
    assert turns[2]["content"] == "Say:\n/bye\nhello."
    history = tmp_path / "exl" / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert TALE in history.read_text(encoding="utf-8")


def test_multiline_input_by_quotes_and_by_alt_enter(start: Start, tmp_path: Path) -> None:
    chat = start("-n", "3")
    chat.type('"""\rone\rtwo"""\r')
    chat.expect("Cut off")
    chat.expect(">>>")
    chat.type("three\x1b\rfour\r")
    chat.expect("Cut off")
    chat.type("/edit\r")
    chat.expect("four")
    chat.type(" and five\r")
    chat.expect("Cut off")
    path = tmp_path / "chat.json"
    chat.type(f"/save {path}\r")
    chat.expect("2 turns")
    leave(chat)
    turns = json.loads(path.read_text(encoding="utf-8"))["messages"]
    assert [turn["content"] for turn in turns[::2]] == ["one\ntwo", "three\nfour and five"]


def test_retry_save_undo_and_load(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "chat-Q.json"
    chat = start("-n", "3")
    for message in ("one", "two"):
        chat.type(message + "\r")
        chat.expect("Cut off")
        chat.expect(">>>")
    chat.type("/retry\r")
    chat.expect("Cut off")
    chat.expect(">>>")
    chat.type(f"/save {path}\r")
    chat.expect("Saved 2 turns")
    chat.expect(">>>")
    chat.type("/undo\r")
    chat.expect("are removed")
    chat.expect(">>>")
    chat.type(f"/load {tmp_path}/ch\t\r")
    chat.expect("Loaded 2 turns")
    chat.expect(">>>")
    chat.type("\x1b[A\x1b[A")  # the second latest input
    chat.expect("/undo")
    chat.type("\r")
    chat.expect("are removed")
    leave(chat)
    turns = json.loads(path.read_text(encoding="utf-8"))["messages"]
    assert [turn["content"] for turn in turns[::2]] == ["one", "two"]


def test_a_full_context_keeps_the_system_prompt(start: Start, tmp_path: Path) -> None:
    chat = start("-c", "128", "-n", "40", "--system", "You are a poet.", "--stats")
    for _ in range(3):
        chat.type("Tell me about the sea, please, and about the sun.\r")
        chat.expect("tok/s")
        chat.expect(">>>")
    chat.type("/system\r")
    chat.expect("You are a poet")
    seen = leave(chat)
    assert "of the oldest turns were dropped" in seen
    assert max(int(size) for size in re.findall(r"context (\d+) tokens", seen)) <= 128


@pytest.mark.thorough
@pytest.mark.parametrize(
    "env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=lambda env: next(iter(env))
)
def test_terminal_without_colors_gets_plain_text(start: Start, env: dict[str, str]) -> None:
    chat = start(**env)
    chat.type("Write a Python function that adds two numbers, in a code block.\r")
    reply = chat.expect(r"```[^`]*```")
    assert "\x1b[" not in reply.partition("```")[2]
    leave(chat)


@pytest.mark.thorough
def test_terminal_shows_the_text_that_a_pipe_gets(start: Start, exl_process: Command) -> None:
    question = "Write a Python function that adds two numbers, in a code block."
    piped = exl_process("chat", "--temp", "0", stdin=f"{question}\n".encode())
    assert (piped.code, piped.err) == (0, "")
    assert "```python" in piped.out
    chat = start()
    chat.type(question + "\r")
    chat.expect(r"```[^`]*```")
    assert piped.out in leave(chat)  # without colors
    assert "\x1b[94mdef" in chat.seen
