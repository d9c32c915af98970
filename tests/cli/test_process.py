"""The command as a process, with the default model: text, memory, signals, pipes, terminals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.terminal import WAIT_S, Terminal

COMMAND = (sys.executable, "-m", "exl_cli")
LONG = ("-p", "Once upon a time", "-n", "2000", "--temp", "0")
MEMORY_LIMIT_MB = 700
LOAD_LIMIT_S = 3.0

PEAK = (  # VmHWM counts this program only; ru_maxrss includes the process it was forked from
    "import re, sys\n"
    "def peak_mb():\n"
    "    status = open('/proc/self/status').read()\n"
    "    return int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) / 1000\n"
)


def start(*args: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
    )


def wait_for_mapped(process: subprocess.Popen[bytes], library: str) -> None:
    """Wait until the process has mapped `library`, so that its import has begun."""
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + WAIT_S
    while library not in maps.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)


def test_text_memory_and_load_time(smollm2_path: Path) -> None:
    prompt = "The capital of France is Paris. The capital of Italy is"
    run = (
        PEAK + "from exl_cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print(peak_mb(), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    args = ("generate", "-p", prompt, "-n", "16", "--temp", "0", "--json")
    done = subprocess.run(
        [sys.executable, "-c", run, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    torch_alone = subprocess.run(
        [sys.executable, "-c", PEAK + "import torch\nprint(peak_mb())"],
        capture_output=True,
        text=True,
        check=True,
    )

    answer = json.loads(done.stdout)
    assert answer["text"].startswith(" Rome")
    assert answer["model"] == smollm2_path.stem
    assert answer["timings"]["load_s"] < LOAD_LIMIT_S
    beyond_torch = float(done.stderr) - float(torch_alone.stdout)
    assert beyond_torch < MEMORY_LIMIT_MB


@pytest.mark.thorough
def test_text_streams_and_ctrl_c_keeps_it() -> None:
    process = start("generate", *LONG)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err == b""
    assert (first + rest).decode().strip()
    assert len(rest) < 4000  # far less than the 2000 tokens of -n


@pytest.mark.thorough
def test_ctrl_c_while_libraries_load_is_quiet() -> None:
    process = start("generate", *LONG)
    wait_for_mapped(process, "libtorch")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.thorough
def test_second_ctrl_c_exits_at_once() -> None:
    process = start("generate", *LONG)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.thorough
def test_closed_pipe_ends_quietly() -> None:
    pipe = f'{" ".join(COMMAND)} generate -p Once -n 2000 | head -c 1; echo " ${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", pipe],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert done.stderr == ""
    assert re.fullmatch(r"(?s).? 141\n", done.stdout)


@pytest.mark.thorough
def test_full_disk_is_a_one_line_error() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "generate", "-p", "Once", "-n", "8"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("exl: error: stdout: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_generate_on_a_terminal_shows_progress_and_speed() -> None:
    terminal = Terminal("generate", "-p", "Once upon a time", "-n", "8", "--temp", "0")
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert "loading" in terminal.seen
    assert "8 generated at" in terminal.seen
    assert "loaded in" in terminal.seen


@pytest.mark.thorough
def test_quiet_shows_only_the_text() -> None:
    args = ("generate", "-p", "Once upon a time", "-n", "8", "--temp", "0")
    terminal = Terminal(*args, "--quiet")
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    piped = subprocess.run(
        [*COMMAND, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert piped.stderr == ""
    assert terminal.seen.replace("\r\n", "\n") == piped.stdout + "\n"
