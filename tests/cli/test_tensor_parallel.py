"""`--tensor-parallel`: the text of one process, and one line if a process fails."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exl_core.parallel.processes import RankProcess
from support.commands import Command
from support.rank_failures import nothing_left
from support.tiny_hybrids import tiny_qwen35
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def no_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nothing_left(monkeypatch, tmp_path):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_llama(), tmp_path / "tiny")


def command(folder: Path, *arguments: str) -> list[str]:
    start = [
        sys.executable,
        "-m",
        "exl_cli",
        "generate",
        str(folder),
        "-p",
        "abc",
        "--device",
        "cpu",
    ]
    return [*start, "--bias", "2=-inf", "--temp", "0", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments), capture_output=True, text=True, check=False, timeout=60
    )


def children_of(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


def test_generate_writes_the_text_of_one_process(folder: Path) -> None:
    one = run(folder, "-n", "24", "--exact")
    two = run(folder, "-n", "24", "--exact", "--tensor-parallel", "2")
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    assert len(one.stdout) > 5
    assert two.stdout == one.stdout


@pytest.mark.parametrize("option", [("--split", "20,24"), ("--cpu-layers", "1")])
def test_contradictions_are_one_line(folder: Path, option: tuple[str, str]) -> None:
    done = run(folder, "--tensor-parallel", "2", *option)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "exl: error: every rank has a part of every layer (expected --tensor-parallel or "
        f"{option[0]}, got both)"
    )


def test_auto_says_why_it_is_one_process(folder: Path) -> None:
    done = run(folder, "-n", "4", "--tensor-parallel", "auto")
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "--tensor-parallel" in line]
    assert lines == [
        "exl: --tensor-parallel auto: 1 process, because on the CPU one process is faster than "
        "several"
    ]


def test_a_killed_rank_ends_the_command_with_one_line(folder: Path) -> None:
    arguments = command(folder, "--tensor-parallel", "2", "-n", "1900")
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)  # it generates
        (rank,) = children_of(running.pid)
        os.kill(rank, signal.SIGKILL)
        started = time.monotonic()
        _, errors = running.communicate(timeout=30)
    assert time.monotonic() - started < 5
    assert running.returncode == 1
    assert errors.splitlines()[-1] == "exl: error: rank 1 of 2 was killed by SIGKILL"
    assert "Traceback" not in errors
    assert not Path(f"/proc/{rank}").exists()


def test_a_stopped_leader_ends_with_all_ranks(folder: Path) -> None:
    """No user can suspend a command without a terminal, so a stopped one counts as hung."""
    with subprocess.Popen(
        command(folder, "--tensor-parallel", "3", "-n", "1900"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)  # it generates
        ranks = children_of(running.pid)
        assert len(ranks) == 2
        running.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        _, errors = running.communicate(timeout=30)
    assert time.monotonic() - started < 5
    assert running.returncode == -signal.SIGKILL
    assert errors.splitlines()[-1] == "exl: error: rank 0 of 3 has not answered for 3.5 s"
    assert not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks)


def test_a_command_that_a_terminal_has_suspended_goes_on(folder: Path) -> None:
    """Ctrl-Z in a terminal, for longer than a hang may last, and then `fg`."""
    leader, terminal = pty.openpty()
    takes_terminal = (
        "import fcntl, os, sys, termios\n"
        "os.setsid()\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            takes_terminal,
            *command(folder, "--tensor-parallel", "2", "-n", "1900", "--exact"),
        ],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        running.send_signal(signal.SIGSTOP)
        time.sleep(6)
        assert len(children_of(running.pid)) == 1
        running.send_signal(signal.SIGCONT)
        _, errors = running.communicate(timeout=60)
    for end in (leader, terminal):
        os.close(end)
    assert running.returncode == 0, errors


def test_a_port_in_use_is_one_line_before_any_rank_starts(
    exl: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(RankProcess, "__init__", lambda *_, **__: started.append(1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for _ in range(2):
            begun = time.monotonic()
            done = exl(
                *("serve-lite", folder, "--port", port, "--device", "cpu"),
                *("--tensor-parallel", "2"),
            )
            seconds = time.monotonic() - begun
            assert port in done.error_line(2)
    assert seconds < 5  # the first call imports the server
    assert not started


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen35], ids=["llama", "delta-net"])
def test_perplexity_is_that_of_one_process(make: Callable[[], Any], tmp_path: Path) -> None:
    """To rounding: the ranks' sums have another order. --compare-to divides both models."""
    model = save(make(), tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i}: The quick brown fox. " for i in range(60)), encoding="utf-8")
    start = [sys.executable, "-m", "exl_cli", "eval", "perplexity", str(model), "--exact"]
    start += ["--text", str(text), "--ctx", "96", "--device", "cpu", "-q", "--json"]

    def run(*more: str) -> dict[str, Any]:
        done = subprocess.run(
            [*start, *more], capture_output=True, text=True, check=False, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    one = run()
    two = run("--tensor-parallel", "2")
    assert one["windows"] > 10
    # Keys and values are cached in half precision, where a rounding may go the other way.
    assert two["window_nll"] == pytest.approx(one["window_nll"], rel=1e-5)
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-6)
    pair = run("--tensor-parallel", "2", "--compare-to", str(model), "--windows", "2")
    assert pair["ln_ppl_ratio"] == 0
