"""Keys that are typed while a command writes to the terminal.

The terminal would echo the keys into the output. With echo off, the terminal queues them, and the
next reader gets them: the next prompt of a chat, or the shell.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_LFLAG = 3  # index of the local modes in the list of termios


@contextmanager
def keys_are_held() -> Iterator[None]:
    """Context manager: typed keys are not shown. Ctrl-C and Ctrl-Z still work.

    Does nothing where stdin is no terminal, or where this process is in the background: there, a
    change of the terminal's modes would stop it.
    """
    terminal = _foreground_terminal()
    if terminal is None:
        yield
        return
    before = termios.tcgetattr(terminal)
    quiet = list(before)
    quiet[_LFLAG] &= ~(termios.ECHO | termios.ICANON)

    def hold(*_: int | FrameType | None) -> None:
        if _foreground_terminal() is not None:
            termios.tcsetattr(terminal, termios.TCSANOW, quiet)

    hold()
    previous = signal.signal(signal.SIGCONT, hold)  # after Ctrl-Z, the shell has changed the modes
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, previous)
        with suppress(termios.error):  # the window was closed
            if _foreground_terminal() is not None:
                termios.tcsetattr(terminal, termios.TCSANOW, before)


def _foreground_terminal() -> int | None:
    """File descriptor of stdin, if it is a terminal whose foreground job is this process."""
    try:
        number = sys.stdin.fileno() if sys.stdin is not None else -1
        is_ours = os.isatty(number) and os.tcgetpgrp(number) == os.getpgrp()
    except (OSError, ValueError):
        return None
    return number if is_ours else None
