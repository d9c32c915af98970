"""Signs of life of rank 0: which silences are hangs, and which are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count

import pytest

from exl_core.parallel import liveness
from exl_core.parallel.liveness import SILENCE_S, RankWatch, Watchdog, _ProcessState

STEP_S = 0.5


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(liveness, "monotonic", found)
    return found


def states(
    letter: str, *, has_terminal: bool = False, share: float = 0.0, reads: int = 0
) -> Iterator[object]:
    """States of a process that uses `share` of a core and reads `reads` pages in each step."""
    for step in count():
        yield _ProcessState(letter, has_terminal, step * reads, step * STEP_S * share)


def seconds_to_hang(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, found: Iterator[object], *, has_loaded: bool
) -> float | None:
    monkeypatch.setattr(liveness, "_state_of", lambda _: next(found))
    watch = RankWatch(4711)
    if has_loaded:
        watch.has_loaded()
    started = clock.now_s
    while clock.now_s < started + 20.0:
        clock.now_s += STEP_S
        if watch.hangs():
            return clock.now_s - started
    return None


@pytest.mark.parametrize(
    ("found", "hangs"),
    [
        (states("S"), True),  # sleeps with the interpreter's lock
        (states("D"), True),
        (states("S", share=0.02), True),  # its threads wait for the lock
        (states("S", share=0.2), False),  # a long call that holds the lock, on a busy machine
        (states("R", share=1.0), False),
        (states("D", reads=3), False),  # reads a large file
        (states("T", share=1.0), True),  # worked until it was stopped
        (states("T", has_terminal=True), False),  # Ctrl-Z
        (states("t"), False),  # a debugger
    ],
)
def test_a_process_that_works_or_is_suspended_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, found: Iterator[object], hangs: bool
) -> None:
    seconds = seconds_to_hang(monkeypatch, clock, found, has_loaded=True)
    assert seconds == (SILENCE_S + STEP_S if hangs else None)


@pytest.mark.parametrize(
    ("found", "hangs"),
    [(states("T"), True), (states("S"), True), (states("R", share=1.0), False)],
)
def test_a_process_that_loads_may_hang_too(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, found: Iterator[object], hangs: bool
) -> None:
    seconds = seconds_to_hang(monkeypatch, clock, found, has_loaded=False)
    assert seconds == (SILENCE_S + STEP_S if hangs else None)


def test_a_process_that_loads_may_wait_for_a_disk(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    assert seconds_to_hang(monkeypatch, clock, states("D"), has_loaded=False) is None


def test_only_beats_count_from_another_machine(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    watch = RankWatch()
    watch.has_loaded()
    for _ in range(20):
        clock.now_s += STEP_S
        watch.heard()
        assert not watch.hangs()
    for _ in range(int(SILENCE_S / STEP_S)):
        clock.now_s += STEP_S
        assert not watch.hangs()
    clock.now_s += STEP_S
    assert watch.hangs()


def test_a_machine_that_slept_waits_for_the_next_beat(clock: Clock) -> None:
    """A laptop or a virtual machine was suspended, and its clock went on."""
    watch = RankWatch()
    watch.has_loaded()
    clock.now_s += 3600.0
    assert not watch.hangs()
    clock.now_s += STEP_S
    assert not watch.hangs()


def test_the_state_of_this_process() -> None:
    state = liveness._state_of(os.getpid())
    assert state is not None
    assert state.letter == "R"
    assert state.reads >= 0
    assert 0 < state.cpu_s < 3600
    assert liveness._state_of(1 << 30) is None


def test_only_a_parent_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a process that has ended may belong to another one."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, _: killed.append(process))
    RankWatch(os.getpid()).kill()
    RankWatch().kill()
    assert not killed
    RankWatch(os.getppid()).kill()
    assert killed == [os.getppid()]


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", -9),
        ("dog.set(0); time.sleep(0.5); os._exit(5)", 5),
        ("[(dog.set(0.3), time.sleep(0.1)) for _ in range(6)]; os._exit(6)", 6),
    ],
)
def test_the_watchdog_kills_a_stopped_process(then: str, code: int) -> None:
    script = (
        "import os, signal, time\n"
        "from exl_core.parallel.liveness import Watchdog\n"
        f"dog = Watchdog()\ndog.set(0.3)\n{then}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=30)
    assert done.returncode == code


def test_a_watchdog_that_was_never_set_does_nothing() -> None:
    Watchdog().set(0)
