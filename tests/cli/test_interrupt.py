"""Ctrl-C during a step, in this process: the partial reply survives, in --json too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exl_cli.interrupt import Interrupt
from exl_core.engine.engine import Engine
from exl_core.engine.events import Event
from support.commands import Command


@pytest.fixture
def interrupt_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`interrupt_in_step(n)` sends SIGINT during the n-th step of an engine."""

    def at(number: int) -> None:
        step, count = Engine.step, iter(range(1, 1_000_000))

        def interrupted(engine: Engine, *request_ids: Any) -> list[Event]:
            events = step(engine, *request_ids)
            if next(count) == number:
                signal.raise_signal(signal.SIGINT)
            return events

        monkeypatch.setattr(Engine, "step", interrupted)

    return at


@pytest.fixture
def args(tiny_llama_dir: Path) -> tuple[object, ...]:
    return ("generate", "-m", tiny_llama_dir, "-p", "Hello", "-n", 100, "--seed", 1)


def test_json_has_the_partial_reply(
    exl: Command, args: tuple[object, ...], interrupt_in_step: Callable[[int], None]
) -> None:
    interrupt_in_step(5)
    done = exl(*args, "--json")
    assert (done.code, done.err) == (130, "")
    answer = json.loads(done.out)
    assert answer["finish_reason"] == "cancelled"
    assert len(answer["token_ids"]) == 5


def test_partial_text_is_printed(
    exl: Command, args: tuple[object, ...], interrupt_in_step: Callable[[int], None]
) -> None:
    whole = exl(*args)
    interrupt_in_step(20)
    done = exl(*args)
    assert (done.code, done.err) == (130, "")
    assert whole.out.startswith(done.out)
    assert whole.out != done.out != ""


def test_interrupt_ends_a_chat_over_a_pipe(
    exl: Command, tiny_llama_dir: Path, interrupt_in_step: Callable[[int], None]
) -> None:
    interrupt_in_step(5)
    done = exl("chat", "-m", tiny_llama_dir, "--seed", 1, stdin=b"Hello\nAgain\n")
    assert (done.code, done.err) == (130, "")
    assert done.out.count("\n") >= 1


def test_second_interrupt_raises_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_set
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_of_an_executed_string_keeps_the_exit_code(tmp_path: Path) -> None:
    """CPython alone ends such a process by SIGINT, if it runs a module."""
    (tmp_path / "interrupted.py").write_text(
        """
import exl_cli.main
from exl_cli.__main__ import run

def main(_):
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return 130

exl_cli.main.main = main
run()
""",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        timeout=60,
    )
    assert process.returncode == 130


@pytest.mark.parametrize("code", [0, 3])
def test_ctrl_c_while_a_finished_command_exits_changes_nothing(code: int) -> None:
    run = (
        "import atexit, os, signal\n"
        "import exl_cli.main\n"
        f"exl_cli.main.main = lambda args: {code}\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "from exl_cli.__main__ import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
