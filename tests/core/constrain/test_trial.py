"""Trial compilation in another process: limits, failures and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exl_core.constrain import trial
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.limits import CompileLimits
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError, ExlError
from support.schemas import SLOW_SCHEMA
from support.scripted import ByteTokenizer

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[trial._Processes]:
    """Trial processes of one test."""
    own = trial._Processes()
    monkeypatch.setattr(trial, "_shared", own)
    yield own
    own.close()


def vocabulary(time_s: float = WAIT_S, memory_bytes: int = 512 * 2**20) -> Vocabulary:
    return Vocabulary(ByteTokenizer(), 288, CompileLimits(time_s, memory_bytes))


def ids_of(processes: trial._Processes) -> list[int]:
    return [process._process.pid for process in (*processes._idle, *processes._busy)]


def is_running(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_compiler_that_exceeds_its_time_is_killed_and_replaced(
    processes: trial._Processes,
) -> None:
    Regex("a").filter(vocabulary())
    before = ids_of(processes)
    started = time.monotonic()
    with pytest.raises(ConstraintError, match=r"too long to compile \(expected at most 0.5 s\)"):
        JsonSchema(SLOW_SCHEMA).filter(vocabulary(time_s=0.5))
    assert time.monotonic() - started < 5
    assert not any(map(is_running, before))
    assert Regex("ab").filter(vocabulary()).mask() is not None
    assert set(ids_of(processes)).isdisjoint(before)


def test_a_compiler_that_exceeds_its_memory_is_an_error() -> None:
    with pytest.raises(ConstraintError, match=r"too much memory.*at most 64 MiB"):
        JsonSchema(SLOW_SCHEMA).filter(vocabulary(memory_bytes=64 * 2**20))
    assert Regex("a").filter(vocabulary()).mask() is not None


def test_one_process_serves_one_constraint_after_the_other(processes: trial._Processes) -> None:
    for pattern in ("a", "b", "c"):
        Regex(pattern).filter(vocabulary())
    assert len(ids_of(processes)) == 1


def test_a_constraint_that_was_tried_is_not_tried_again(processes: trial._Processes) -> None:
    Regex("abc").filter(vocabulary())
    with pytest.raises(ConstraintError, match="unclosed group"):
        Regex("(a").filter(vocabulary())
    processes.close()
    assert Regex("abc").filter(vocabulary()).mask() is not None
    with pytest.raises(ConstraintError, match="unclosed group"):
        Regex("(a").filter(vocabulary())


def test_an_idle_process_that_was_killed_is_replaced(processes: trial._Processes) -> None:
    Regex("a").filter(vocabulary())
    processes._idle[0]._process.kill()
    assert Regex("b").filter(vocabulary()).mask() is not None


def test_a_process_that_ends_before_it_receives_a_constraint_is_replaced(
    processes: trial._Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    Regex("a").filter(vocabulary())
    processes._idle[0]._process.kill()
    monkeypatch.setattr(trial._Process, "is_alive", True)  # it ends after the check
    assert Regex("b").filter(vocabulary()).mask() is not None


def test_a_slow_constraint_does_not_delay_another_one(processes: trial._Processes) -> None:
    with ThreadPoolExecutor(1) as slow:
        refused = slow.submit(JsonSchema(SLOW_SCHEMA).filter, vocabulary(time_s=5))
        wait_until(lambda: processes._busy)
        assert Regex("a").filter(vocabulary()).mask() is not None
        assert not refused.done()
        processes.close()
        with pytest.raises(trial.TrialStoppedError):
            refused.result(WAIT_S)


def test_stop_ends_a_running_trial_and_refuses_further_ones(
    processes: trial._Processes,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(JsonSchema(SLOW_SCHEMA).filter, vocabulary())
        while not processes._busy or not processes._busy[0].is_used:
            time.sleep(0.01)
        started = time.monotonic()
        trial.stop()
        with pytest.raises(trial.TrialStoppedError, match="about to end"):
            slow.result(WAIT_S)
    assert time.monotonic() - started < 5
    with pytest.raises(trial.TrialStoppedError, match="about to end"):
        Regex("ab").filter(vocabulary())


def test_other_threads_run_while_a_constraint_is_compiled() -> None:
    longest = 0.0
    done = threading.Event()

    def refuse() -> None:
        with pytest.raises(ConstraintError):
            JsonSchema(SLOW_SCHEMA).filter(vocabulary(time_s=1))
        done.set()

    thread = threading.Thread(target=refuse)
    thread.start()
    last = time.monotonic()
    while not done.is_set():
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    assert longest < 0.5


def test_a_process_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(ExlError, match="cannot be started"):
            Regex("a").filter(vocabulary())


PROGRAM = """
import os, sys, threading
from exl_core.constrain import trial
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.limits import CompileLimits
from exl_core.constrain.vocabulary import Vocabulary
from support.schemas import SLOW_SCHEMA
from support.scripted import ByteTokenizer

slow = JsonSchema(SLOW_SCHEMA).filter
limits = CompileLimits(60.0, 2**32)
args = (Vocabulary(ByteTokenizer(), 288, limits),)
threading.Thread(target=slow, args=args, daemon=True).start()
while not trial._processes()._busy:
    pass
print(trial._processes()._busy[0]._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["exit", "kill"])
def test_the_process_ends_with_its_parent_while_it_compiles(way: str) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", PROGRAM),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        compiling = int(parent.stdout.readline())
        assert is_running(compiling)
        if way == "exit":
            parent.stdin.close()
            assert parent.wait(WAIT_S) == 0
        else:
            parent.kill()
    wait_until(lambda: not is_running(compiling))


def test_a_fork_starts_processes_of_its_own(processes: trial._Processes) -> None:
    Regex("a").filter(vocabulary())
    (before,) = ids_of(processes)
    process_id = os.fork()
    if process_id == 0:  # no assert: a failure here would run the rest of the tests twice
        Regex("b").filter(vocabulary())
        own = ids_of(trial._processes())
        trial._processes().close()
        processes.close()
        os._exit(0 if own and before not in own else 1)
    assert os.waitpid(process_id, 0)[1] == 0
    assert is_running(before)
    assert Regex("c").filter(vocabulary()).mask() is not None
    assert ids_of(processes) == [before]


def test_the_process_does_not_import_torch() -> None:
    program = "import sys, exl_core.constrain.trial_process; assert 'torch' not in sys.modules"
    subprocess.run((sys.executable, "-c", program), check=True)
