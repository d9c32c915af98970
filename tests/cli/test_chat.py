"""`exl chat` over a pipe, with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def chat(exl, tiny_llama_dir: Path):
    """`chat(b"lines", *args)`: greedy, short replies, no stop but the limit."""
    args = ("chat", "-m", tiny_llama_dir, "--temp", "0", "-n", 6)
    return lambda data, *more: exl(*args, *more, stdin=data)


def test_replies_are_all_that_stdout_gets(chat) -> None:
    done = chat(b"Hello\nAgain\n")
    assert (done.code, done.err) == (0, "")
    first = chat(b"Hello\n")
    assert done.out.startswith(first.out)
    assert len(done.out) > len(first.out) > 1
    assert done.out.endswith("\n")


def test_turns_are_remembered_and_clear_forgets_them(chat) -> None:
    twice = chat(b"Hello\nHello\n").out
    cleared = chat(b"Hello\n/clear\nHello\n").out
    once = chat(b"Hello\n").out
    assert cleared == once + once
    assert twice != cleared


def test_bye_leaves_and_blank_lines_are_skipped(chat) -> None:
    assert chat(b"\n  \nHello\n/bye\nAgain\n").out == chat(b"Hello\n").out


def test_other_slashes_are_text(chat) -> None:
    assert chat(b"/etc/hosts holds what?\n").out != ""


def test_nothing_to_read_is_no_failure(chat) -> None:
    done = chat(b"")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_a_full_context_drops_old_turns_and_goes_on(chat) -> None:
    done = chat(b"Hello there, how are you?\n" * 20, "-c", 128)
    assert (done.code, done.err) == (0, "")


def test_a_message_that_cannot_fit_is_reported_and_the_next_is_answered(chat) -> None:
    done = chat(b"Hello\n" + b"x" * 400 + b"\nHello\n", "-c", 128)
    assert done.code == 1
    lines = done.err.splitlines()
    assert "does not fit into the context" in lines[0]
    assert all(line.startswith("exl: error: ") for line in lines)
    assert len(lines) == 2
    assert "Traceback" not in done.err
    assert done.out == chat(b"Hello\nHello\n", "-c", 128).out


def test_a_line_that_is_no_text_is_an_error(chat) -> None:
    line = chat(b"\xff\n").error_line(2)
    assert "line 1" in line


def test_a_model_without_template_is_refused(exl, damaged_dir: Path) -> None:
    (damaged_dir / "chat_template.jinja").unlink()
    assert "no chat template" in exl("chat", damaged_dir, stdin=b"Hello\n").error_line(3)
