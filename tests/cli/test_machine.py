"""Failures of the machine (memory, threads, stdout) become a one-line error and an exit code."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exl_cli.output import write_error
from support.commands import Command, Outcome

TORCH_WORDS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 64 bytes. Error code 12 (Cannot allocate memory)\nframe #0: ..."
)
PAGES = (("--help",), ("--version",), ("generate", "--help"))


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch, exl: Command) -> Callable[[Exception], Outcome]:
    """`fail_with(error)` runs a command in which a library raises `error`."""

    def run(error: Exception) -> Outcome:
        def broken(*_args: object) -> str:
            raise error

        monkeypatch.setattr("exl_cli.commands.generate.prompts.read_prompt", broken)
        return exl("generate", "-p", "x")

    return run


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(TORCH_WORDS),
    ],
    ids=["python", "system", "torch"],
)
def test_out_of_memory(fail_with: Callable[[Exception], Outcome], error: Exception) -> None:
    assert "not enough memory" in fail_with(error).error_line(4)


def test_thread_limit(fail_with: Callable[[Exception], Outcome]) -> None:
    assert "--threads" in fail_with(RuntimeError("can't start new thread")).error_line(1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        PermissionError(errno.EACCES, "Permission denied", "some/file"),
        OSError(errno.EIO, "Input/output error", "some/file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_exceptions_keep_their_traceback(
    fail_with: Callable[[Exception], Outcome], error: Exception
) -> None:
    with pytest.raises(type(error)):
        fail_with(error)


@pytest.mark.thorough
def test_memory_limit_is_a_one_line_error() -> None:
    """A real RLIMIT_AS that leaves enough memory for the imports and too little for the weights."""
    script = (
        "import re, resource, sys\n"
        "import exl_cli.load\n"
        "from exl_cli.main import main\n"
        "status = open('/proc/self/status').read()\n"
        "used = int(re.search(r'VmSize:\\s+(\\d+) kB', status)[1]) * 1024\n"
        "limit = used + 300 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "sys.exit(main(['generate', '-p', 'x', '-n', '1', '--threads', '1']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("exl: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("args", PAGES, ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "expected"),
    [(">/dev/full", "No space left"), ("1</dev/null", "Bad file"), (">&-", "closed")],
)
def test_help_to_a_broken_stdout(args: tuple[str, ...], redirection: str, expected: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "exl_cli", *args],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("exl: error: stdout: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_exit_code_survives_a_broken_stderr(unbuffered: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}  # an empty value counts as unset
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "exl_cli", "sreve"]
        done = subprocess.run(command, stderr=full, env=env, check=False, timeout=60)
    assert done.returncode == 2


def test_an_error_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a line logged by another thread can come between the text and its newline."""
    written: list[str] = []
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "write", written.append)
    monkeypatch.setattr(sys, "stderr", stderr)
    write_error("rank 1 of 4 has ended")
    assert written == ["exl: error: rank 1 of 4 has ended\n"]
