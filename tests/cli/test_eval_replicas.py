"""`exl eval` with replicas: the figures and texts of one process, errors, resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from exl_cli import replicas
from exl_cli.commands.eval.replicated import ModelJob
from exl_cli.eval_options import Loading
from support.commands import Command
from support.tiny_models import save, tiny_llama

TEXT = "The quick brown fox jumps over the lazy dog. "
VARYING = ("seconds", "tokens_per_s", "kept_windows")  # fields that depend on the run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number}: {TEXT}" for number in range(60)), encoding="utf-8")
    return path


def command(model: Path, text: Path, *args: object) -> list[str]:
    options = ["--text", text, "--ctx", 64, "-q", "--json", *args]
    return [sys.executable, "-m", "exl_cli", "eval", "perplexity", *map(str, [model, *options])]


def run_apart(*args: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: Ray starts threads and sockets that outlive a test."""
    return subprocess.run(command(*args), capture_output=True, text=True, check=False, timeout=120)


def figures(out: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(out).items() if name not in VARYING}


@pytest.mark.thorough
@pytest.mark.parametrize("place", [(), ("--ray", "local")], ids=["processes", "ray"])
def test_two_replicas_have_the_figures_of_one_process(
    place: tuple[str, ...], exl: Command, tiny_llama_dir: Path, text: Path, tmp_path: Path
) -> None:
    options = ("--text", text, "--ctx", 64, "-q", "--json")
    alone = exl("eval", "perplexity", tiny_llama_dir, *options)
    kept = ("--resume", tmp_path / "kept")
    done = run_apart(tiny_llama_dir, text, "--replicas", 2, *kept, *place)
    assert (done.returncode, done.stderr) == (0, "")
    assert figures(done.stdout) == figures(alone.out)
    again = exl("eval", "perplexity", tiny_llama_dir, *options, *kept)
    assert json.loads(again.out)["kept_windows"] == json.loads(alone.out)["windows"]
    assert figures(again.out) == figures(alone.out)


@pytest.mark.thorough
@pytest.mark.parametrize("place", [(), ("--ray", "local")], ids=["processes", "ray"])
def test_two_replicas_have_the_divergence_of_one_process(
    place: tuple[str, ...], exl: Command, tiny_llama_dir: Path, text: Path, tmp_path: Path
) -> None:
    other = save(tiny_llama(intermediate_size=96), tmp_path / "other")
    options = ("--reference", tiny_llama_dir, "--text", text, "--ctx", 64, "-q", "--json")
    alone = exl("eval", "divergence", other, *options)
    kept = ("--resume", tmp_path / "kept")
    start = [sys.executable, "-m", "exl_cli", "eval", "divergence"]
    done = subprocess.run(
        [*start, *map(str, [other, *options, "--replicas", 2, *kept, *place])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(alone.out)["kld"]["mean"] > 0
    assert figures(done.stdout) == figures(alone.out)
    again = exl("eval", "divergence", other, *options, *kept)
    assert figures(again.out) == figures(alone.out)
    assert json.loads(again.out)["kept_windows"] > 5


def test_a_reference_file_and_replicas_are_refused(exl: Command, text: Path) -> None:
    found = exl(
        *("eval", "divergence", "a", "--reference", "b", "--text", text, "--replicas", 2),
        *("--cache-reference", "file"),
    )
    assert found.error_line(2).startswith("a replica has both models at the same time")


@pytest.mark.parametrize(("wanted", "windows", "started"), [(8, 3, 3), (2, 3, 2), (None, 3, 1)])
def test_no_replica_is_idle(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, windows: int, started: int
) -> None:
    made: list[int] = []

    class Started:
        def __init__(self, number: int, *_: object, **__: object) -> None:
            made.append(number)

        def close(self) -> None:
            pass

    monkeypatch.setattr(replicas, "LocalReplica", Started)
    job = ModelJob(Loading("cpu", 1, True, True, True), "model")
    with replicas.opened(cast(Any, job), wanted, None, units=windows, is_quiet=True) as found:
        assert len(found) == len(made) == started


@pytest.mark.thorough
@pytest.mark.parametrize("place", [(), ("--ray", "local")], ids=["processes", "ray"])
def test_errors_of_a_replica_arrive(place: tuple[str, ...], text: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    done = run_apart(missing, text, "--replicas", 2, *place)
    assert done.returncode == 3
    assert f"{missing}: no such model" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_a_killed_replica_ends_the_run_and_keeps_its_windows(
    tiny_llama_dir: Path, text: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    args = command(tiny_llama_dir, text, "--replicas", 2, "--resume", kept, "--token-by-token")
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True) as run:
        until = time.monotonic() + 60
        while not (kept.exists() and len(kept.read_bytes().split(b"\n")) > 3):
            assert time.monotonic() < until
            assert run.poll() is None, "it ended before a replica could be killed"
            time.sleep(0.01)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        os.kill(int(next(pid for pid in lines if b"spawn_main" in lines[pid])), signal.SIGKILL)
        _, err = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "the process ended with code -9" in err
    assert err.count("\n") == 1
    done = run_apart(tiny_llama_dir, text, "--resume", kept, "--token-by-token")
    assert json.loads(done.stdout)["kept_windows"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("place", [(), ("--ray", "local")], ids=["processes", "ray"])
def test_two_replicas_write_the_completions_of_one_process(
    place: tuple[str, ...], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "problems.jsonl"
    problems = (
        {"task_id": f"made/{i}", "prompt": f"def f{i}():\n", "entry_point": f"f{i}", "test": ""}
        for i in range(5)
    )
    path.write_text("\n".join(map(json.dumps, problems)), encoding="utf-8")
    start = [sys.executable, "-m", "exl_cli", "eval", "humaneval", str(path)]
    start += ["-m", str(tiny_llama_dir), "--allow-code-execution", "--json", "-q"]
    options = ["-n", "6", "--samples", "4", "--temp", "1"]

    def run(*args: str) -> dict[str, Any]:
        done = subprocess.run(
            [*start, *options, *args], capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    alone = run()
    assert len({one["completion"] for one in alone["completions"]}) > 10
    assert run("--replicas", "2", *place) == alone
    kept = tmp_path / "kept"
    assert run("--replicas", "2", "--resume", str(kept), *place) == alone
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) * 2 // 3])  # the run was killed
    assert run("--resume", str(kept)) == alone
    assert kept.read_bytes() == whole
    done = subprocess.run(
        [*start, *options, "--resume", str(kept), "--temp", "0.5"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 2
    assert "the file holds windows of another run: temperature differs" in done.stderr
