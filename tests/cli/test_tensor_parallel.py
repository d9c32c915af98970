"""`--tensor-parallel`: the text of one process, and one line if a process fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough


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
