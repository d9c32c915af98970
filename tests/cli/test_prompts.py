"""Sources of a prompt, how they combine, and errors that are raised before a model loads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exl_cli.prompts import read_prompt
from exl_core.errors import RequestError
from support.commands import Command


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """`stdin(b"...")` replaces stdin by a file with these bytes."""

    def put(data: bytes) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(data)
        monkeypatch.setattr(sys, "stdin", path.open(encoding="utf-8"))

    yield put
    if not sys.stdin.closed:
        sys.stdin.close()


def test_prompt_option(stdin: Callable[[bytes], None]) -> None:
    stdin(b"")
    assert read_prompt("Hello", None) == "Hello"


def test_piped_text_is_appended_to_the_prompt(stdin: Callable[[bytes], None]) -> None:
    stdin("grüße\nzwei\n".encode())
    assert read_prompt("Translate:", None) == "Translate:\ngrüße\nzwei"


@pytest.mark.parametrize(("prompt", "file"), [(None, None), ("-", None), (None, "-")])
def test_stdin_loses_one_final_newline(
    stdin: Callable[[bytes], None], prompt: str | None, file: str | None
) -> None:
    stdin(b" a\n\n")
    assert read_prompt(prompt, file) == " a\n"


def test_file(tmp_path: Path, stdin: Callable[[bytes], None]) -> None:
    stdin(b"not read")
    path = tmp_path / "prompt.txt"
    path.write_bytes("日本\r\nx\n".encode())
    assert read_prompt(None, str(path)) == "日本\r\nx"


def test_byte_order_mark_is_no_part_of_a_prompt(
    tmp_path: Path, stdin: Callable[[bytes], None]
) -> None:
    marked = b"\xef\xbb\xbfhello"
    stdin(marked)
    path = tmp_path / "prompt.txt"
    path.write_bytes(marked)
    assert read_prompt("-", None) == read_prompt(None, str(path)) == "hello"
    path.write_bytes(marked + b"\xff")
    with pytest.raises(RequestError, match="0xff at offset 8"):
        read_prompt(None, str(path))


def test_a_pipe_may_be_named_as_a_file(exl: Command) -> None:
    arguments = ["inspect", "tokens", "-f", "/dev/stdin", "--json"]
    command = [sys.executable, "-m", "exl_cli", *arguments]
    done = subprocess.run(command, input=b"one two\n", capture_output=True, check=True)
    assert done.stderr == b""
    assert done.stdout.decode() == exl("inspect", "tokens", "-p", "one two", "--json").out


def test_a_pipe_of_the_shell_is_read_like_stdin(stdin: Callable[[bytes], None]) -> None:
    stdin(b"not read")
    reader, writer = os.pipe()
    try:
        os.write(writer, "grüße\n".encode())
        os.close(writer)
        assert read_prompt(None, f"/dev/fd/{reader}") == "grüße"
    finally:
        os.close(reader)


def test_a_pipe_of_the_shell_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl_cli.prompts.PROMPT_LIMIT_BYTES", 1000)
    line = 'exec "$0" -m exl_cli generate -f <(yes)'
    reader, writer = os.pipe()
    try:
        os.write(writer, b"y" * 1001)
        os.close(writer)
        with pytest.raises(RequestError, match=r"longer than any context.*at most 1000 bytes"):
            read_prompt(None, f"/dev/fd/{reader}")
    finally:
        os.close(reader)
    # The real limit: the command ends although the writer never does.
    done = subprocess.run(
        ["bash", "-c", line, sys.executable],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "longer than any context" in done.stderr


def test_a_fifo_of_the_file_system_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(RequestError, match="a FIFO or pipe"):
        read_prompt(None, str(fifo))


def test_closed_stdin_is_an_error() -> None:
    done = _with_stdin_closed("generate")
    assert done.returncode == 2
    assert "no prompt" in done.stderr


def test_closed_stdin_is_ignored_with_a_prompt() -> None:
    done = _with_stdin_closed("generate", "-p", "x", "-m", "missing-model-dir/x/y")
    assert done.returncode == 3
    assert "no such model" in done.stderr


def _with_stdin_closed(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "exl_cli", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("args", "data", "expected"),
    [
        (("-p", ""), b"", "the prompt is empty"),
        ((), b"", "the prompt is empty"),
        (("-f", "/nonexistent/prompt.txt"), b"", "/nonexistent/prompt.txt"),
        (("-f", "/"), b"", "cannot be read"),
        ((), b"abc\xff", "byte 0xff at offset 3"),
        (("-p", "a", "-f", "b"), b"", "-p and -f"),
        (("-p", "a", "--system", "b"), b"", "--chat"),
        (("-p", "a", "--chat", "--parse-special"), b"", "--parse-special"),
        (("-p", "a", "-n", "0"), b"", "-n 1 or more"),
        (("-p", "a", "--repeat-penalty", "-1"), b"", "repetition_penalty"),
        (("-p", "a", "--top-p", "0"), b"", "'--top-p': 0 is not above 0"),
        (("-p", "a", "--top-p", "1.5"), b"", "'--top-p': 1.5"),
        (("-p", "a", "--top-p", "nan"), b"", "'--top-p': nan"),
        (("-p", "a", "--threads", "5000"), b"", "1024"),
        (("-p", "a", "--seed", "-1"), b"", "seed"),
        (("-p", "a", "-m", "one", "two"), b"", "two models"),
    ],
)
def test_invalid_requests_are_refused(
    args: tuple[str, ...], data: bytes, expected: str, exl: Command
) -> None:
    line = exl("generate", *args, stdin=data).error_line(2)
    assert expected in line


def test_prompt_that_is_not_utf8_is_refused(exl: Command) -> None:
    line = exl("generate", "-p", os.fsdecode(b"ab\xff")).error_line(2)
    assert "UTF-8" in line


def test_terminal_without_a_prompt_is_an_error() -> None:
    """The command neither becomes interactive nor waits for input from the terminal."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "exl_cli", "generate"],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "exl chat" in done.stderr


@pytest.mark.thorough
def test_waiting_for_stdin_is_announced() -> None:
    """With -p a user may not expect that the command reads stdin."""
    process = subprocess.Popen(
        [sys.executable, "-m", "exl_cli", "generate", "-p", "x", "-m", "missing-model"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    started = time.monotonic()
    line = process.stderr.readline()
    assert "waiting for text on stdin" in line
    assert time.monotonic() - started < 20
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert err.startswith("exl: error: ")
