"""The fuzzer notices every kind of finding, and the readers have none in a bounded run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exl_core.errors import RequestError
from fuzz.run import Run
from fuzz.targets import Target, make_targets

TESTS = Path(__file__).parents[1]


def planted(kind: str) -> Target:
    """A reader that misbehaves for one of four inputs, and refuses or accepts the others."""

    def change(rng: random.Random, seed: bytes, others: list[bytes]) -> bytes:
        return bytes([rng.randrange(4)])

    def read(where: Path, data: bytes) -> None:
        if data[0] == 1:
            raise RequestError("refused")
        if data[0] != 0:
            return
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif kind == "hang":
            time.sleep(60)
        elif kind == "escape":
            raise KeyError("x")
        else:
            bytearray(1 << 28)

    return Target(kind, 1.0, [b"\7"], read, change)


@pytest.mark.parametrize("kind", ["crash", "hang", "escape", "memory"])
def test_the_fuzzer_finds(tmp_path: Path, kind: str) -> None:
    found = Run(planted(kind), tmp_path, seed=1, limit_s=0.3).all(16)
    assert {one["kind"] for one in found["findings"]} == {kind}
    ended = sum(one["kind"] in ("crash", "hang") for one in found["findings"])
    assert sum(found["outcomes"].values()) + ended == 16
    assert found["outcomes"]["RequestError"] > 0
    assert found["outcomes"]["valid"] > 0


@pytest.mark.thorough
def test_seeds_are_valid(tmp_path: Path) -> None:
    """Otherwise every input would fail the same check."""
    where = tmp_path / "input"
    where.mkdir()
    for target in make_targets(tmp_path):
        for seed in target.seeds if target.name != "kernel operands" else []:
            for file in where.iterdir():
                file.unlink()
            target.read(where, seed)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_corrupt_inputs_have_no_findings() -> None:
    """A tenth of `nox -s fuzz`."""
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.run", "--inputs", "100000", "--seed", "2"],
        check=False,
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )
    result = json.loads(done.stdout.splitlines()[-1])
    findings = [one for target in result["targets"].values() for one in target["findings"]]
    assert findings == []
    assert result["inputs"] >= 99_000
