"""Runs a Python program that a model wrote, in a child process with limits.

The child (`sandbox_child.py`) has its own temporary folder, a bare environment, no input, and
limits on processor time, memory, file size and open files. Where the kernel allows it, it runs in
namespaces of its own: without network, and with all processes that it starts ending with it. Where
the kernel has Landlock, it can write to its folder only, and reads no files but those and the
interpreter's. Elsewhere it can read, and as far as permissions go write, other files of the user:
run untrusted models in a container there.

A program passes if it runs to its end. Leaving early, with whatever exit code, is no pass: the end
of the program writes a random token to a pipe.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
_ERROR_BYTES = 4096


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program, which count for each of its processes, but `time_s` for all."""

    time_s: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    num_files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error`: last line of the program's errors. `is_isolated`: it had no network. `is_confined`:
    it had no files but its own and the interpreter's."""

    verdict: Verdict
    error: str
    is_isolated: bool
    is_confined: bool


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Run `source` in a child process. Returns within `time_s` and some tenths of a second."""
    limits = limits or Limits()
    token = secrets.token_hex(16)
    reader, writer = os.pipe()
    settings: dict[str, object] = {
        "pipe": writer,
        "token": token,
        "limits": {
            "RLIMIT_CPU": max(1, round(limits.time_s)),
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": limits.num_files,
            "RLIMIT_CORE": 0,
        },
    }
    with tempfile.TemporaryDirectory(prefix="exl-program-", ignore_cleanup_errors=True) as folder:
        errors = Path(folder) / "stderr"
        settings["folder"] = folder
        try:
            code = _wait(settings, source, errors, writer, limits.time_s)
            os.set_blocking(reader, False)  # a process that was left behind may hold the other end
            said = _read(reader).split()
        finally:
            os.close(writer)
            os.close(reader)
        with errors.open("rb") as file:
            file.seek(max(0, errors.stat().st_size - _ERROR_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    verdict = Verdict.PASSED if code == 0 and said[2:] == [token] else Verdict.FAILED
    if code is None:
        verdict = Verdict.TIMED_OUT
    error = lines[-1] if lines else ""
    return Outcome(verdict, error, "isolated" in said[:1], "confined" in said[1:2])


def _read(pipe: int) -> str:
    try:
        return os.read(pipe, 4096).decode("ascii", "replace")
    except BlockingIOError:
        return ""


def _wait(
    settings: dict[str, object], source: str, errors: Path, pipe: int, time_s: float
) -> int | None:
    """Exit code of the program; None if it was ended at its limit of time. Its folder is that of
    `errors`."""
    folder = str(errors.parent)
    with errors.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            pass_fds=(pipe,),
            start_new_session=True,
        )
    try:
        child.communicate(source.encode(), timeout=time_s)
        return child.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
