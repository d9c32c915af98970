"""HumanEval and its sandbox: verdicts, limits, isolation, and the schema of the problems."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from exl_core.errors import RequestError
from exl_eval.humaneval import HumanEvalOptions, Problem, read_problems, run_humaneval
from exl_eval.sandbox import Limits, Verdict, run_program
from support.generators import loaded_around
from support.scripted import reply_with

ADD = Problem(
    task_id="made/0",
    prompt='def add(a: int, b: int) -> int:\n    """Sum of a and b."""\n',
    entry_point="add",
    test="def check(add):\n    assert add(2, 3) == 5\n    assert add(-1, 1) == 0\n",
)
SHORT = Limits(time_s=1.5)
ENOUGH = Limits(time_s=20)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("import os; os._exit(0)", ""),
        ("raise SystemExit", ""),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(1 << 22))", ""),
        ("print(input())", "EOFError: EOF when reading a line"),
    ],
)
def test_programs_that_do_not_reach_their_end_fail(source: str, error: str) -> None:
    outcome = run_program(source, ENOUGH)
    assert outcome.verdict is Verdict.FAILED
    assert error in outcome.error


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(60)"])
def test_programs_end_at_their_limit_of_time(source: str) -> None:
    started = time.monotonic()
    assert run_program(source, SHORT).verdict is Verdict.TIMED_OUT
    assert time.monotonic() - started < 10


def test_programs_have_no_network_where_they_are_isolated() -> None:
    source = (
        "import socket\n"
        "with socket.socket() as s:\n"
        "    s.settimeout(1)\n"
        "    try:\n"
        "        s.connect(('192.0.2.1', 80))\n"
        "    except OSError as error:\n"
        "        assert error.errno == 101, error  # ENETUNREACH\n"
    )
    outcome = run_program(source, ENOUGH)
    if outcome.is_isolated:
        assert outcome.verdict is Verdict.PASSED, outcome.error


def test_programs_have_a_folder_of_their_own_and_a_bare_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "x")
    source = (
        "import os\n"
        "assert 'SECRET' not in os.environ\n"
        "assert os.listdir() == ['stderr']\n"
        "assert os.environ['HOME'] == os.getcwd()\n"
        "print('x' * (1 << 25))\n"
    )
    outcome = run_program(source, ENOUGH)
    assert outcome.verdict is Verdict.PASSED, outcome.error


def test_programs_have_no_files_but_their_own_where_they_are_confined(tmp_path: Path) -> None:
    """Reading, writing, listing, linking and removing files outside of the folder fail."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    source = (
        "import os, json, decimal, tempfile\n"
        f"secret, folder = {str(secret)!r}, {str(tmp_path)!r}\n"
        "def refused(do, *arguments):\n"
        "    try:\n"
        "        do(*arguments)\n"
        "    except PermissionError:\n"
        "        return True\n"
        "    return False\n"
        "assert refused(open, secret)\n"
        "assert refused(open, secret, 'w')\n"
        "assert refused(open, folder + '/new', 'w')\n"
        "assert refused(os.listdir, folder)\n"
        "assert refused(os.unlink, secret)\n"
        "assert refused(os.mkdir, folder + '/dir')\n"
        "assert refused(os.listdir, '/proc')\n"
        "open('mine', 'w').write('y')\n"
        "assert open('mine').read() == 'y'\n"
        "os.rename('mine', 'yours')\n"
        "assert tempfile.TemporaryFile().write(b'z') == 1\n"
        "os.write(os.open('/dev/null', os.O_WRONLY), b'z')\n"
        "assert decimal.Decimal('1.5') * 2 == 3\n"
    )
    outcome = run_program(source, ENOUGH)
    if outcome.is_confined:
        assert outcome.verdict is Verdict.PASSED, outcome.error
    assert secret.read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_processes_that_a_program_starts_end_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(1)\n"
        f"    open({str(mark)!r}, 'w').close()\n"
        "    os._exit(0)\n"
    )
    outcome = run_program(source, ENOUGH)
    assert outcome.verdict is Verdict.PASSED, outcome.error
    if outcome.is_isolated:
        time.sleep(1.5)
        assert not mark.exists()


@pytest.mark.parametrize(
    ("reply", "rate"), [("    return a + b\n\ndef other():", 1.0), ("    return a - b", 0.0)]
)
def test_pass_at_1(reply: str, rate: float) -> None:
    loaded = loaded_around(reply_with(reply))
    result = run_humaneval(loaded, [ADD], HumanEvalOptions(samples=2, limits=ENOUGH))
    assert result.pass_at_1 == rate
    completion, _, _ = reply.partition("\ndef")
    assert [one.completion for one in result.completions] == [completion] * 2
    assert result.verdicts["passed"] == 2 * rate


def test_bad_problems_are_named(tmp_path: Path) -> None:
    good = json.dumps({name: getattr(ADD, name) for name in ADD.__slots__})
    path = tmp_path / "problems.jsonl"
    for line, words in (
        ("{", "line 3: is not valid JSON"),
        ('{"task_id": 1}', "line 3: is no problem"),
        (good.replace('"add"', '"add; x"'), "entry_point is no name"),
    ):
        path.write_text(f"{good}\n\n{line}\n")
        with pytest.raises(RequestError, match=words):
            read_problems(path)
    assert read_problems(path, limit=1) == [ADD]
    path.write_text("\n")
    with pytest.raises(RequestError, match="holds no problems"):
        read_problems(path)
