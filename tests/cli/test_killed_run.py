"""A process killed in the middle of a run: the resumed run does not repeat finished windows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import Command

pytestmark = pytest.mark.thorough

WAIT_S = 60


def test_killed_run_resumes(exl: Command, tiny_llama_dir: Path, tmp_path: Path) -> None:
    text, kept = tmp_path / "text.txt", tmp_path / "kept"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 290, encoding="utf-8")
    run = ("eval", "perplexity", str(tiny_llama_dir), "--text", str(text), "--ctx", "64", "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "exl_cli", *run, "--resume", str(kept)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        started = time.monotonic()
        while not kept.exists() or kept.stat().st_size < 4000:
            assert process.poll() is None
            assert time.monotonic() - started < WAIT_S
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    resumed = json.loads(exl(*run, "--resume", kept).out)
    assert 2 <= resumed["kept_windows"] < resumed["windows"]
    whole = json.loads(exl(*run).out)
    assert (whole["kept_windows"], whole["windows"]) == (0, resumed["windows"])
    assert resumed["window_nll"] == whole["window_nll"]
    assert resumed["perplexity"] == whole["perplexity"]
