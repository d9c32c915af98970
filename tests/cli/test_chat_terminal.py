"""`exl chat` on a pseudo-terminal, with the default model."""

from __future__ import annotations

import json
import re
import stat
import tomllib
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
        temperature = () if "--profile" in args else ("--temp", "0")
        terminal = Terminal(
            "chat", *temperature, *args, env={"XDG_STATE_HOME": str(tmp_path), **env}
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


def test_a_reply_wraps_at_words_in_a_window_that_changes(start: Start) -> None:
    chat = start("-n", "120", "--seed", "1", **{"NO_COLOR": "1"})
    chat.resize(24, 40)
    chat.type("A tale of a dragon.\r")
    chat.expect(r"dragon\.[^\n]*\n")
    wide = chat.expect(r"(?:[^\n]+\n){4}")
    chat.resize(24, 25)
    chat.expect(r"\n")  # the line that the resize met
    narrow = chat.expect(r"(?:[^\n]+\n){4}")
    rest = chat.expect(r"Cut off")
    leave(chat)
    assert 25 < max(len(line) for line in lines_of(wide)) <= 40
    assert max(len(line) for line in lines_of(narrow)) <= 25

    chat = start("-n", "120", "--seed", "1", "--no-wrap", **{"NO_COLOR": "1"})
    chat.resize(24, 40)
    chat.type("A tale of a dragon.\r")
    chat.expect(r"dragon\.[^\n]*\n")
    unwrapped = without_colors(chat.expect("Cut off")).split()
    leave(chat)
    words = without_colors(f"{wide} {narrow} {rest}").split()
    assert set(words) <= set(unwrapped)  # no word is cut in two
    assert len(words) > 60


def lines_of(seen: str) -> list[str]:
    return without_colors(seen).splitlines()


def test_keys_during_a_reply_wait_for_the_next_message(start: Start) -> None:
    chat = start("-n", "60")
    chat.type(TALE + "\r")
    chat.expect(r"dragon\.[^\n]*\n")
    chat.expect(r"[A-Za-z]{3}")
    chat.type("QXQX")
    reply = chat.expect(r"Cut off[^\n]*\n")
    assert "QXQX" not in reply
    chat.expect(">>>")
    chat.expect("QXQX")  # the line editor shows what was typed ahead
    chat.type("\x15")
    chat.type("\x04")
    assert chat.wait() == 0


def test_commands_as_people_of_ollama_type_them(start: Start, tmp_path: Path) -> None:
    chat = start(EXL_CONFIG=str(tmp_path / "config.toml"), HF_HOME=str(tmp_path / "hub"))
    for typed, answer in (
        ("/set temperature 0.2", "temperature is now 0.2"),
        ("/set parameter top_k 7", "top_k is now 7"),
        ("/set parameter num_predict 5", "num_predict is now 5"),
        ("/set num_ctx 4096", "fixed when a chat starts.*Start exl chat with -c"),
        ("/set temprature 1", "The nearest is temperature"),
        ("/set verbose", "stats is now on"),
        ("/set nowordwrap", "wrap is now off"),
        ("/set system Speak like a pirate.", "The system prompt is changed"),
        ("/show", "SmolLM2-135M-Instruct"),
        ("/show parameters", r"temp +0\.2"),
        ("/show system", "Speak like a pirate"),
        ("/show template", "im_start"),
        ("/models", "/model NAME"),
        ("/modle", "The nearest is /model"),
        ("/model no-such-model", "no such model"),
        ("/model smollm2", "The model is now SmolLM2-135M-Instruct"),
        ("/save pirate", "exl chat --profile pirate"),
        ("/set temp 1.5", "temp is now 1.5"),
        ("/load pirate", "The preset pirate is applied"),
        ("/show temp", r"temp +0\.2"),
        ("Hello", "tok/s"),
    ):
        chat.type(typed + "\r")
        chat.expect(f"(?s){answer}")
        chat.expect(">>>")
    chat.type("/quit\r")
    assert chat.wait() == 0
    assert "Traceback" not in chat.seen
    preset = tomllib.loads((tmp_path / "presets" / "pirate.toml").read_text(encoding="utf-8"))
    assert preset == {
        "model": "smollm2",
        "system": "Speak like a pirate.",
        "max-tokens": 5,
        "stats": True,
        "wrap": False,
        "temp": 0.2,
        "top-k": 7,
    }

    chat = start("--profile", "pirate", EXL_CONFIG=str(tmp_path / "config.toml"))
    chat.type("/show system\r")
    chat.expect("Speak like a pirate")
    leave(chat)


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
    # Without colors. The words are the same; long lines are broken between them.
    assert " ".join(piped.out.split()) in " ".join(leave(chat).split())
    assert "\x1b[94mdef" in chat.seen
