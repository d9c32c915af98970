"""Runs the `exl` command on a pseudo-terminal, types keys and reads its output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

COMMAND = (sys.executable, "-m", "exl_cli")
WAIT_S = 60
TAKE_TERMINAL = (  # makes it the controlling terminal of the session, so that Ctrl-C sends SIGINT
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


class Terminal:
    """An `exl` process on its own pseudo-terminal. `seen`: all output so far."""

    def __init__(self, *args: str, env: Mapping[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *COMMAND, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **(env or {})},
        )
        os.close(theirs)
        self.seen = ""
        self._position = 0

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def expect(self, pattern: str) -> str:
        """Wait for the pattern after the previous match. Returns the output from there to its
        end."""
        deadline = time.monotonic() + WAIT_S
        while (match := re.search(pattern, self.seen[self._position :])) is None:
            piece = self._read(deadline, pattern)
            assert piece, f"it ended without {pattern!r}: {self.seen[self._position :]!r}"
            self.seen += piece
        passed = self.seen[self._position : self._position + match.end()]
        self._position += match.end()
        return passed

    def wait(self) -> int:
        """Read until the program ends. Returns its exit code."""
        deadline = time.monotonic() + WAIT_S
        while piece := self._read(deadline):
            self.seen += piece
        return self._process.wait(WAIT_S)

    def _read(self, deadline: float, pattern: str = "") -> str:
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self._ours], [], [], left)
        assert ready, f"timeout: neither the end nor {pattern!r} in {self.seen[self._position :]!r}"
        try:
            return os.read(self._ours, 65536).decode(errors="replace")
        except OSError:  # EIO: on Linux, the other side is closed
            return ""

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal and send SIGWINCH to the program."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.killpg(self._process.pid, signal.SIGWINCH)


def without_colors(seen: str) -> str:
    """Output without escape sequences, with `\\n` as line ends."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r\n", "\n")
