"""`exl generate --batch-file`: records, their order, errors, resuming, replicas, Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exl_cli.prompts import read_stdin_lines
from exl_core.errors import RequestError
from support.commands import Command

GREEDY = ("--temp", "0", "-n", "6")
Records = list[dict[str, Any]]


@pytest.fixture
def generate(exl: Command, tiny_llama_dir: Path) -> Command:
    return lambda *args, **options: exl("generate", "-m", tiny_llama_dir, *args, **options)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def prompts(path: Path, count: int) -> Path:
    lines = [{"prompt": f"Number {i}", "id": f"n{i}"} for i in range(count)]
    lines[1]["max_tokens"] = 3.0  # type: ignore[assignment]  # from a language without integers
    return write_lines(path, *lines)


def parsed(text: str) -> Records:
    return [json.loads(line) for line in text.splitlines()]


def test_records_are_in_order_and_equal_single_replies(generate: Command, tmp_path: Path) -> None:
    file = prompts(tmp_path / "p.jsonl", 9)
    done = generate("--batch-file", file, "--max-batch", 4, "-q", "--batch-invariant", *GREEDY)
    assert (done.code, done.err) == (0, "")
    records = parsed(done.out)
    assert [(one["index"], one["id"]) for one in records] == [(i, f"n{i}") for i in range(9)]
    assert records[1]["completion_tokens"] == 3
    for number in (0, 5):
        single = generate("-p", f"Number {number}", "--json", "--batch-invariant", *GREEDY)
        assert records[number]["text"] == json.loads(single.out)["text"]


def test_full_disk_is_named_with_the_output(
    generate: Command, tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    file, out = prompts(tmp_path / "p.jsonl", 9), tmp_path / "out.jsonl"
    small_files(400)
    line = generate("--batch-file", file, "--output", out, "-q", *GREEDY).error_line(6)
    assert line == f"{out}: there is no space left (got File too large)"


def test_half_a_surrogate_pair_in_an_id_is_kept(generate: Command, tmp_path: Path) -> None:
    file, out = (
        write_lines(tmp_path / "p.jsonl", {"prompt": "Hi", "id": "\ud800"}),
        tmp_path / "out",
    )
    assert generate("--batch-file", file, "--output", out, "-q", *GREEDY).code == 0
    assert parsed(out.read_text(encoding="utf-8"))[0]["id"] == "\ud800"


def test_each_prompt_has_a_seed_of_its_own(generate: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "Hello"}, {"prompt": "Hello"})
    args = ("--batch-file", file, "-q", "-n", 16, "--seed", 5)
    first, second = parsed(generate(*args).out)
    assert first["text"] != second["text"]
    again = parsed(generate(*args).out)
    assert [one["text"] for one in again] == [first["text"], second["text"]]


def test_a_prompt_that_cannot_be_answered_has_a_record(generate: Command, tmp_path: Path) -> None:
    long = {"prompt": "word " * 9000}
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "Hello"}, long, {"prompt": "Bye"})
    out = tmp_path / "out.jsonl"
    done = generate("--batch-file", file, "--output", out, "--json", *GREEDY)
    assert done.code == 1
    assert "1 of 3 prompts have no reply" in done.err
    summary = json.loads(done.out)
    assert (summary["done"], summary["failed"], summary["prompts"]) == (3, 1, 3)
    first, failed, last = parsed(out.read_text(encoding="utf-8"))
    assert "leaves no room for a reply" in failed["error"]
    assert "text" in first
    assert "text" in last

    again = generate("--batch-file", file, "--output", out, "--json", *GREEDY)
    assert again.code == 1, "a prompt still has no reply"
    assert json.loads(again.out)["failed"] == 1


def test_a_stopped_run_continues(generate: Command, tmp_path: Path) -> None:
    file, whole, part = prompts(tmp_path / "p", 8), tmp_path / "whole", tmp_path / "part"
    args = ("--batch-file", file, "-q", "--batch-invariant", *GREEDY)
    assert generate(*args, "--output", whole).code == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # the fourth was cut off
    done = generate(*args, "--output", part, "--json")
    assert json.loads(done.out)["done_earlier"] == 3
    assert part.read_bytes() == whole.read_bytes()
    done = generate(*args, "--output", part, "--json")
    assert json.loads(done.out)["done_earlier"] == 8, "nothing is left to do"

    other = generate(*args, "--output", part, "--top-k", 3)
    assert other.code == 2
    assert "other records than this batch would write" in other.err
    assert part.read_bytes() == whole.read_bytes()


def test_prompts_from_stdin_give_the_records_of_a_file(generate: Command, tmp_path: Path) -> None:
    file, out = prompts(tmp_path / "p.jsonl", 6), tmp_path / "out.jsonl"
    args = ("-q", "--batch-invariant", *GREEDY)
    whole = generate("--batch-file", file, *args).out
    piped = generate("--batch-file", "-", *args, stdin=file.read_bytes())
    assert (piped.code, piped.out, piped.err) == (0, whole, "")

    lines = whole.encode().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:20])  # the third was cut off
    again = ("--batch-file", "-", "--output", out, "--json", *args)
    done = generate(*again, stdin=file.read_bytes())
    assert json.loads(done.out)["done_earlier"] == 2
    assert out.read_text(encoding="utf-8") == whole
    line = generate(*again, stdin=b'{"prompt": "another"}\n').error_line(2)
    assert line.startswith(f"{out}, line 1: the file holds other records")


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"", "stdin: the batch has no prompts"),
        (b'{"prompt": "fine"}\n{', "stdin, line 2: is not valid JSON"),
    ],
)
def test_bad_prompts_on_stdin_are_named(generate: Command, stdin: bytes, message: str) -> None:
    assert generate("--batch-file", "-", stdin=stdin).error_line(2).startswith(message)


def test_prompts_are_not_read_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with pytest.raises(RequestError, match=r"no prompts .*got a terminal"):
            read_stdin_lines(100)


def test_prompts_on_stdin_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stdin"
    file.write_bytes(b"x" * 101)
    with file.open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(RequestError, match="the batch is too large"):
            read_stdin_lines(100)


@pytest.mark.parametrize("text", ["no line end", '{"index": 0, "key": "0", "text": "'])
def test_a_file_with_other_contents_stays(generate: Command, tmp_path: Path, text: str) -> None:
    file, out = prompts(tmp_path / "p", 8), tmp_path / "out"
    out.write_text(text, encoding="utf-8")
    line = generate("--batch-file", file, "--output", out, "-q", *GREEDY).error_line(2)
    assert line.startswith(f"{out}, line 1: the file holds other records")
    assert out.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "no JSON object"),
        ("{}", "prompt or messages"),
        ('{"prompt": "a", "messages": []}', "prompt or messages"),
        ('{"prompt": ""}', "prompt is no text"),
        ('{"prompt": "\\ud800"}', "UTF-8"),
        ('{"messages": [{"role": "user"}]}', "not a role and a text"),
        ('{"prompt": "a", "max_token": 3}', "The nearest known one is max_tokens"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens is no count"),
        ('{"prompt": "a", "id": 1.5}', "id is no name"),
    ],
)
def test_bad_lines_are_named(generate: Command, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + line + "\n", encoding="utf-8")
    done = generate("--batch-file", file)
    assert (done.code, done.out) == (2, "")
    assert f"{file}, line 3" in done.err
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-p", "a", "--batch-file", "FILE"), "two kinds of prompts"),
        (("-p", "a", "--output", "x"), "--output is for --batch-file"),
        (("-p", "a", "--replicas", "2"), "--replicas is for --batch-file"),
        (("-p", "a", "--ray", "local"), "--ray is for --batch-file"),
        (("--batch-file", "FILE", "--json"), "Add --output"),
        (("--batch-file", "none.jsonl"), "none.jsonl"),
    ],
)
def test_contradictions_are_refused(
    generate: Command, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    file = prompts(tmp_path / "p.jsonl", 2)
    done = generate(*(str(file) if arg == "FILE" else arg for arg in args))
    assert done.code == 2
    assert message in done.err


def test_a_closed_pipe_ends_the_run(tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = prompts(tmp_path / "p.jsonl", 300)
    command = [sys.executable, "-m", "exl_cli", "generate", "-m", str(tiny_llama_dir), "-q"]
    command += ["--batch-file", str(file), *GREEDY]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as run:  # type: ignore[call-overload]
        assert json.loads(run.stdout.readline())["index"] == 0
        run.stdout.close()
        err = run.stderr.read()
    assert (run.returncode, err) == (141, "")


def test_nothing_listens_at_the_ray_address(generate: Command, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        file = prompts(tmp_path / "p.jsonl", 2)
        started = time.perf_counter()
        done = generate("--batch-file", file, "--ray", address)
    assert done.code == 1
    assert f"{address}: Ray cannot be reached" in done.err
    assert time.perf_counter() - started < 30


def run_apart(*args: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: Ray starts threads and sockets that outlive a test."""
    command = [sys.executable, "-m", "exl_cli", "generate", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.thorough
@pytest.mark.parametrize("place", [(), ("--ray", "local")], ids=["processes", "ray"])
def test_two_replicas_write_what_one_process_writes(
    place: tuple[str, ...], generate: Command, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    file = prompts(tmp_path / "p.jsonl", 40)
    args = ("--batch-file", file, "-q", "--batch-invariant", *GREEDY)
    one, two = tmp_path / "one", tmp_path / "two"
    assert generate(*args, "--output", one).code == 0
    more = ("--output", two, "--replicas", 2, "--max-batch", 2, *place)
    done = run_apart("-m", tiny_llama_dir, *args, *more)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert two.read_bytes() == one.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("place", [(), ("--ray", "local")], ids=["processes", "ray"])
def test_errors_of_a_replica_arrive(place: tuple[str, ...], tmp_path: Path) -> None:
    file = prompts(tmp_path / "p.jsonl", 2)
    missing = tmp_path / "missing"
    done = run_apart("-m", missing, "--batch-file", file, "--replicas", 2, *place)
    assert done.returncode == 3
    assert f"{missing}: no such model" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_a_killed_replica_ends_the_run_and_a_repetition_continues(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    file, out = prompts(tmp_path / "p.jsonl", 3000), tmp_path / "out"
    command = [sys.executable, "-m", "exl_cli", "generate", "-m", str(tiny_llama_dir), "-q"]
    command += ["--batch-file", str(file), "--output", str(out), "--replicas", "2"]
    command += ["--max-batch", "4", *GREEDY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        wait_for(lambda: out.exists() and out.stat().st_size > 0)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        workers = [int(pid) for pid in children if "spawn_main" in command_of(pid)]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        _, err = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "the process ended with code -9" in err
    assert err.count("\n") == 1
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    done = len(out.read_bytes().splitlines())
    assert 0 < done < 3000

    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as again:
        wait_for(lambda: len(out.read_bytes().splitlines()) > done)
        again.send_signal(signal.SIGINT)
        summary, _ = again.communicate(timeout=30)
    assert again.returncode == 130
    assert json.loads(summary)["done_earlier"] == done
    records = parsed(out.read_text(encoding="utf-8"))
    assert [one["index"] for one in records] == list(range(len(records)))


@pytest.mark.thorough
def test_an_interrupted_run_of_ray_continues(
    generate: Command, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """Two replicas on the CPU. The first run is interrupted, the second killed, the third
    completes the file, which is then that of one process."""
    pytest.importorskip("ray")
    file, one, out = prompts(tmp_path / "p.jsonl", 400), tmp_path / "one", tmp_path / "out"
    args = ("--batch-file", file, "--batch-invariant", *GREEDY)
    assert generate(*args, "-q", "--output", one).code == 0
    command = [sys.executable, "-m", "exl_cli", "generate", "-m", str(tiny_llama_dir), "-q"]
    command += [*map(str, args), "--output", str(out), "--replicas", "2", "--ray", "local"]
    command += ["--max-batch", "2", "--json"]

    def lines() -> int:
        return len(out.read_bytes().splitlines()) if out.exists() else 0

    done = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            wait_for(lambda before=done: lines() > before)
            run.send_signal(number)
            summary, _ = run.communicate(timeout=60)
        assert run.returncode == code
        if summary:
            assert json.loads(summary)["done_earlier"] == done
        done = lines()
        assert 0 < done < 400, "it was not interrupted"
    last = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (last.returncode, last.stderr) == (0, "")
    assert json.loads(last.stdout)["done_earlier"] in (done, done - 1)  # a record may be cut off
    assert out.read_bytes() == one.read_bytes()


def command_of(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)
