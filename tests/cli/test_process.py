"""The command as a process, with the default model: text, memory, signals, pipes, terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "exl_cli")
LONG = ("-p", "Once upon a time", "-n", "2000", "--temp", "0")
MEMORY_LIMIT_MB = 700
LOAD_LIMIT_S = 3.0
WAIT_S = 60

PEAK = (  # VmHWM counts this program alone, while ru_maxrss remembers what it was forked from
    "import re, sys\n"
    "def peak_mb():\n"
    "    status = open('/proc/self/status').read()\n"
    "    return int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) / 1000\n"
)
TAKE_TERMINAL = (  # the session's controlling terminal, which is where Ctrl-C becomes a signal
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def start(*args: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
    )


def wait_for_mapped(process: subprocess.Popen[bytes], library: str) -> None:
    """Until the process has begun to load a library."""
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + WAIT_S
    while library not in maps.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)


def test_text_memory_and_load_time(smollm2_path: Path) -> None:
    prompt = "The capital of France is Paris. The capital of Italy is"
    run = (
        PEAK + "from exl_cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print(peak_mb(), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    args = ("generate", "-p", prompt, "-n", "16", "--temp", "0", "--json")
    done = subprocess.run(
        [sys.executable, "-c", run, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    torch_alone = subprocess.run(
        [sys.executable, "-c", PEAK + "import torch\nprint(peak_mb())"],
        capture_output=True,
        text=True,
        check=True,
    )

    answer = json.loads(done.stdout)
    assert answer["text"].startswith(" Rome")
    assert answer["model"] == smollm2_path.stem
    assert answer["timings"]["load_s"] < LOAD_LIMIT_S
    beyond_torch = float(done.stderr) - float(torch_alone.stdout)
    assert beyond_torch < MEMORY_LIMIT_MB


def test_text_comes_as_it_is_made_and_ctrl_c_keeps_it() -> None:
    process = start("generate", *LONG)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err == b""
    assert (first + rest).decode().strip()
    assert len(rest) < 4000  # far from the 2000 tokens that were asked for


def test_ctrl_c_while_libraries_load_is_quiet() -> None:
    process = start("generate", *LONG)
    wait_for_mapped(process, "libtorch")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_two_ctrl_c_do_not_wait() -> None:
    process = start("generate", *LONG)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, b"")


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    pipe = f'{" ".join(COMMAND)} generate -p Once -n 2000 | head -c 1; echo " ${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", pipe],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert done.stderr == ""
    assert re.fullmatch(r"(?s).? 141\n", done.stdout)


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "generate", "-p", "Once", "-n", "8"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("exl: error: stdout: ")
    assert done.stderr.count("\n") == 1


class Terminal:
    """A program on a pseudo-terminal of its own, as a person would have it."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *COMMAND, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(theirs)
        self.seen = ""
        self._position = 0

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def expect(self, pattern: str) -> str:
        """Wait until the pattern comes after what was expected before; what came until then."""
        deadline = time.monotonic() + WAIT_S
        while (match := re.search(pattern, self.seen[self._position :])) is None:
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, f"no {pattern!r} in {self.seen[self._position :]!r}"
            self.seen += self._read()
        passed = self.seen[self._position : self._position + match.end()]
        self._position += match.end()
        return passed

    def wait(self) -> int:
        """Read on until the program ends; its exit code."""
        while piece := self._read():
            self.seen += piece
        return self._process.wait(WAIT_S)

    def _read(self) -> str:
        try:
            return os.read(self._ours, 65536).decode(errors="replace")
        except OSError:  # how Linux says that the other side is closed
            return ""

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)


@pytest.fixture
def chat() -> Iterator[Terminal]:
    terminal = Terminal("chat", "--temp", "0")
    yield terminal
    terminal.close()


def test_chat_on_a_terminal(chat: Terminal) -> None:
    chat.expect("Ctrl-D leaves")
    chat.expect(">>>")
    chat.type("Write a very long story about a dragon.\r")
    chat.expect(r"dragon\.[^\n]*\n")
    chat.expect(r"[A-Za-z]{3}")  # the reply streams
    chat.type("\x03")
    chat.expect("Stopped")
    chat.expect(">>>")
    chat.type("half a line\x03")
    chat.expect("Ctrl-D leaves")
    chat.expect(">>>")
    chat.type("/stats\r")
    chat.expect("Speed is shown")
    chat.expect(">>>")
    chat.type("Say hello.\r")
    chat.expect(r"tok/s")
    chat.expect(">>>")
    chat.type("\x04")
    assert chat.wait() == 0
    assert "Traceback" not in chat.seen


def test_generate_on_a_terminal_shows_progress_and_speed() -> None:
    terminal = Terminal("generate", "-p", "Once upon a time", "-n", "8", "--temp", "0")
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert "loading" in terminal.seen
    assert "8 generated at" in terminal.seen
    assert "loaded in" in terminal.seen


def test_quiet_shows_the_text_alone() -> None:
    args = ("generate", "-p", "Once upon a time", "-n", "8", "--temp", "0")
    terminal = Terminal(*args, "--quiet")
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    piped = subprocess.run(
        [*COMMAND, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert piped.stderr == ""
    assert terminal.seen.replace("\r\n", "\n") == piped.stdout + "\n"
