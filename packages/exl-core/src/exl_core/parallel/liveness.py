"""Whether a rank lives, in the eyes of another one, and the end of a rank 0 that hangs.

Rank 0 and each follower send each other a beat twice a second, from a thread of their own, so a
long pass or a slow request does not delay it. Beats stop if the whole process stands still, or if
one call holds the interpreter. A rank on the same machine tells these apart: a process that
computes or reads files is slow, and one that does neither hangs. A process that the user of a
terminal, or a debugger, has suspended does not hang either. From another machine only the beats are
visible.

Imports only the standard library, so that the beats are read before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from time import monotonic
from typing import NamedTuple

BEAT_S = 0.5
SILENCE_S = 3.5
"""A rank that says nothing for so long hangs. It beats twice a second."""
LOADING_SILENCE_S = 60.0
"""The same for a rank on another machine until it has loaded: imports and large files may hold the
interpreter."""
WORKING_SHARE = 0.05
"""Share of a core that a process uses at least if it computes. Threads that wait for the
interpreter wake up 200 times a second, and use less."""
_STOPPED, _TRACED, _READING = "T", "t", "D"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _ProcessState(NamedTuple):
    """Numbers of a process from `/proc`."""

    letter: str
    has_terminal: bool
    reads: int
    """Page faults that read files."""
    cpu_s: float
    """Processor time of all threads."""


def _state_of(process: int) -> _ProcessState | None:
    """None for a process that has ended, or on systems without `/proc`."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third one on: a name may have any character
    ticks = int(fields[11]) + int(fields[12])  # in user and kernel mode
    return _ProcessState(fields[0], fields[4] != "0", int(fields[9]), ticks / _TICKS_PER_S)


class RankWatch:
    """When another rank was heard last. `process`: its process id, on the same machine; else
    None."""

    def __init__(self, process: int | None = None) -> None:
        self.process = process
        self.limit_s = LOADING_SILENCE_S if process is None else SILENCE_S
        self.is_loading = True
        self._alive_s = self._seen_s = self._sampled_s = monotonic()
        self._state: _ProcessState | None = None

    def has_loaded(self, limit_s: float = SILENCE_S) -> None:
        """From now on, the rank beats regularly."""
        self.heard()
        self.limit_s = limit_s
        self.is_loading = False

    def heard(self) -> None:
        self._alive_s = monotonic()

    def hangs(self) -> bool:
        """Whether the rank has given no sign of life for `limit_s`. Asked several times a
        second."""
        now = monotonic()
        passed_s, self._seen_s = now - self._seen_s, now
        was_suspended = passed_s > SILENCE_S / 2  # this process was, and the other may have been
        if was_suspended or (now - self._sampled_s >= BEAT_S and self._is_slow(now)):
            self._alive_s = now
        return now - self._alive_s > self.limit_s

    def _is_slow(self, now: float) -> bool:
        """Whether the process has done something since the last sample, or waits on purpose."""
        before, passed_s, self._sampled_s = self._state, now - self._sampled_s, now
        self._state = state = None if self.process is None else _state_of(self.process)
        if state is None:
            return False
        if state.letter == _STOPPED:
            return state.has_terminal
        if state.letter == _TRACED or (state.letter == _READING and self.is_loading):
            return True
        if before is None:
            return False
        return state.reads > before.reads or state.cpu_s - before.cpu_s > WORKING_SHARE * passed_s

    def kill(self) -> None:
        """Ends the process of rank 0, this one's parent, whatever state it is in."""
        if self.process is not None and self.process == os.getppid():
            os.kill(self.process, signal.SIGKILL)


class _SignalEvent(ctypes.Structure):
    """`struct sigevent`, padded to its size of 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("padding", ctypes.c_int * 12),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Watchdog:
    """A timer of the kernel that kills this process unless it is set again in time.

    It also ends a stopped process. On another host, no other process may be able to end it.
    """

    def __init__(self) -> None:
        """Not running yet. OSError if the system has no such timers."""
        self._library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "timer_create"):
            self._library = ctypes.CDLL("librt.so.1", use_errno=True)  # glibc before 2.34
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(number=signal.SIGKILL, kind=0)  # SIGEV_SIGNAL
        made = self._library.timer_create(1, ctypes.byref(event), ctypes.byref(self._timer))
        self._check(made)  # of CLOCK_MONOTONIC, which stands still while the machine sleeps

    def set(self, seconds: float) -> None:
        """The process ends after this time, unless this is called again; 0: it does not."""
        whole, part = divmod(round(seconds * 1_000_000_000), 1_000_000_000)
        spec = _TimerSpec(0, 0, whole, part)
        self._check(self._library.timer_settime(self._timer, 0, ctypes.byref(spec), None))

    @staticmethod
    def _check(result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
