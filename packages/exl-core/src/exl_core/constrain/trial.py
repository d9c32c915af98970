"""Trial compilation of constraints in processes that can be killed.

A compiler may run for minutes and use gigabytes, and a thread that runs it cannot be stopped.
Therefore another process compiles every grammar first (`trial_process.py`), with limits on time and
memory. The engine's process compiles only grammars that have passed, which takes it about as long.
Results of the most recent grammars are cached, so that a grammar is not tried again.

A process starts at first use (about 0.1 s), compiles one grammar after the other, and ends with
this process. A process that was killed is replaced at the next use.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Lock, Semaphore
from typing import Any

from exl_core.constrain.limits import CompileLimits
from exl_core.errors import ConstraintLimitError, ExlError

MAX_PROCESSES = 2
"""Two, so that a constraint that runs into its time limit does not delay the next one."""
_MAX_ANSWERS = 256
_START_LIMIT_S = 60.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from exl_core.constrain.trial_process import main; main(int(sys.argv[2]))"
)


class TrialStoppedError(ExlError):
    """A constraint was not compiled because of `stop`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One grammar to compile.

    grammar  in llguidance's variant of Lark
    special  special tokens that the grammar may name
    limits   arguments of llguidance's `LLParserLimits`
    schema   JSON schema that the grammar was generated from, or None
    """

    grammar: str
    special: tuple[str, ...]
    limits: dict[str, int]
    schema: object = None

    def line(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a trial.

    error       the compiler's message, "" if there is none
    is_endless  the schema describes no finite document
    """

    error: str
    is_endless: bool = False


def run(trial: Trial, limits: CompileLimits, name: str) -> Answer:
    """Compile a grammar in another process. Safe on any thread.

    Raises ConstraintLimitError past a limit. `name` is the constraint's name in messages.
    """
    return _processes().run(trial.line(), limits, name)


def stop() -> None:
    """End all trials, and refuse further ones: this process is about to end."""
    _processes().close()


@dataclass
class _Processes:
    """Trial processes of this process."""

    owner: int = field(default_factory=os.getpid)
    _lock: Lock = field(default_factory=Lock)
    _places: Semaphore = field(default_factory=lambda: Semaphore(MAX_PROCESSES))
    _idle: list[_Process] = field(default_factory=list)
    _busy: list[_Process] = field(default_factory=list)
    _answers: OrderedDict[bytes, Answer] = field(default_factory=OrderedDict)
    _is_closed: bool = False
    inherited: _Processes | None = None  # after a fork: kept, because their finalizers would warn

    def run(self, line: bytes, limits: CompileLimits, name: str) -> Answer:
        key = sha256(line).digest()
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        with self._places:
            answer = self._ask(line, limits, name)
        with self._lock:
            self._answers[key] = answer
            if len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)
        return answer

    def close(self) -> None:
        """Kill all processes. Trials that run fail."""
        if self.owner != os.getpid():
            return  # inherited by a fork
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
        for process in idle:
            process.close()

    def _ask(self, line: bytes, limits: CompileLimits, name: str) -> Answer:
        while True:
            if self._is_closed:
                raise _not_compiled(name)
            process = self._take(limits.memory_bytes)
            is_used, is_ready = process.is_used, False
            try:
                answer = process.ask(line, limits.time_s)
                is_ready = True
                return answer
            except TimeoutError:
                raise ConstraintLimitError(
                    f"{name} takes too long to compile",
                    expected=f"at most {limits.time_s:g} s",
                    next_step="Make it smaller, or its multipleOf, patterns and alternatives "
                    "simpler.",
                ) from None
            except OSError as error:
                process.kill()
                if self._is_closed:
                    raise _not_compiled(name) from error
                if is_used:
                    continue  # it may have ended before it received this grammar
                raise ConstraintLimitError(
                    f"{name} takes too much memory, or nests too deeply, to compile",
                    expected=f"at most {limits.memory_bytes // 2**20} MiB",
                    got=f"exit status {process.exit_status}",
                ) from error
            finally:
                self._put_back(process, is_ready=is_ready)

    def _take(self, memory_bytes: int) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.memory_bytes == memory_bytes and process.is_alive:
                    self._busy.append(process)
                    return process
                process.close()
        process = _Process(memory_bytes)
        with self._lock:
            self._busy.append(process)
            if self._is_closed:
                process.kill()
        return process

    def _put_back(self, process: _Process, *, is_ready: bool) -> None:
        with self._lock:
            self._busy.remove(process)
            is_kept = is_ready and not self._is_closed
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.close()


class _Process:
    """Trial process that waits for a grammar, or compiles one."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.is_used = False
        self._socket, theirs = socket.socketpair()
        path = json.dumps([entry for entry in sys.path if entry])
        try:
            with theirs:
                self._process = subprocess.Popen(
                    (sys.executable, "-I", "-c", _BOOT, path, str(memory_bytes)),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in a terminal does not reach it
                )
        except OSError as error:
            self._socket.close()
            raise _cannot_start(error) from error
        try:
            self._receive(time.monotonic() + _START_LIMIT_S)
        except OSError as error:
            self.close()
            raise _cannot_start(f"exit status {self.exit_status}") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def ask(self, line: bytes, time_s: float) -> Answer:
        """Raises TimeoutError past `time_s`, and another OSError if the process has ended."""
        self.is_used = True
        end = time.monotonic() + time_s
        self._socket.settimeout(time_s)
        self._socket.sendall(line)
        return Answer(**self._receive(end))

    def kill(self) -> None:
        """Kill the process. May be called repeatedly, and while another thread is in `ask`."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close the socket. No other thread may use this object."""
        self.kill()
        self._socket.close()

    def _receive(self, end: float) -> dict[str, Any]:
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            parts.append(self._socket.recv(2**16))
            if not parts[-1]:
                raise ConnectionResetError("the process has ended")
        answer: dict[str, Any] = json.loads(b"".join(parts))
        return answer


def _not_compiled(name: str) -> TrialStoppedError:
    return TrialStoppedError(f"{name} was not compiled, because this process is about to end")


def _cannot_start(got: object) -> ExlError:
    return ExlError(
        "the process that tries constraints cannot be started",
        expected=f"a Python at {sys.executable!r} that can import llguidance",
        got=got,
    )


_shared: _Processes | None = None
_shared_lock = Lock()


def _processes() -> _Processes:
    """Trial processes of this process; a fork gets its own."""
    global _shared  # noqa: PLW0603 - one set of processes, started at first use
    with _shared_lock:
        if _shared is None or _shared.owner != os.getpid():
            _shared = _Processes(inherited=_shared)
            atexit.register(_shared.close)
        return _shared
