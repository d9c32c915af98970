"""Fuzzes the readers of strangers' files: python -m fuzz.run [--inputs N] [--seed N] [--json FILE].

Each target (`targets.py`) gets its share of the inputs. Child processes read them, a chunk each, in
a folder in memory. An input is a finding if it

  crash    ends the process by a signal
  hang     takes longer than `--limit` seconds
  escape   raises an exception that the target does not allow
  memory   needs more than MARGIN_BYTES and twice its size: the address space is limited, and
           Python's own allocations are traced for every `TRACE_EVERY`-th input

Coverage guides the search: for every `TRACE_EVERY`-th input the executed lines of exl_core are
recorded, and an input with new lines becomes a seed of later chunks. The last line printed is JSON.
The exit status is 1 if there are findings. Inputs depend on the seed only, except for such seeds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fuzz.targets import Target, make_targets

CHUNK = 4000  # inputs of one child process
TRACE_EVERY = 32
MARGIN_BYTES = 64 << 20  # beside twice the input's size; for whole models see MODEL_MARGIN_BYTES
MODEL_MARGIN_BYTES = 256 << 20
PYTHON_MARGIN_BYTES = 4 << 20
MAX_GROWN = 400
_CORE = f"{os.sep}exl_core{os.sep}"

Lines = set[tuple[str, int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(": python")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of one input")
    parser.add_argument("--only", default="", help="targets whose names contain this")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    started, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        targets = [one for one in make_targets(Path(folder)) if args.only in one.name]
        total = sum(one.share for one in targets)
        results = {}
        for target in targets:
            count = max(1, round(args.inputs * target.share / total))
            results[target.name] = Run(target, Path(folder), args.seed, args.limit).all(count)
            print(target.name, json.dumps(results[target.name]), file=sys.stderr, flush=True)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "inputs": sum(one["inputs"] for one in results.values()),
        "findings": sum(len(one["findings"]) for one in results.values()),
        "seconds": round(time.monotonic() - started),
        "cpu_seconds": round(time.process_time() - cpu + children.ru_utime + children.ru_stime),
        "seed": args.seed,
        "targets": results,
    }
    text = json.dumps(result)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 1 if result["findings"] else 0


class Run:
    """All inputs of one target."""

    def __init__(self, target: Target, folder: Path, seed: int, limit_s: float) -> None:
        self._target = target
        # Inputs of these say how to change a file, or how to make operands; both are larger.
        self._is_model = "checkpoint" in target.name or "kernel" in target.name
        self._where = folder / "input"
        self._where.mkdir(exist_ok=True)
        self._seed, self._limit_s = seed, limit_s
        self._outcomes: Counter[str] = Counter()
        self._findings: list[dict[str, Any]] = []
        self._lines: Lines = set()
        self._progress = mmap.mmap(-1, 8)  # number of the input that a child works on

    def all(self, count: int) -> dict[str, Any]:
        first = 0
        while first < count:
            first = self._chunk(first, min(first + CHUNK, count))
        for file in self._where.iterdir():
            file.unlink()
        return {
            "inputs": count,
            "outcomes": dict(self._outcomes.most_common()),
            "seeds_by_coverage": len(self._target.grown),
            "lines": len(self._lines),
            "findings": self._findings,
        }

    def _chunk(self, first: int, end: int) -> int:
        """Runs inputs first .. end - 1 in a child; returns the first that remains to be run."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(self._work(first, end), pipe)
                pipe.flush()
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        if status == 0:
            done = json.loads(said)
            self._outcomes.update(done["outcomes"])
            self._findings += done["findings"]
            self._lines |= {(file, line) for file, line in done["lines"]}
            room = MAX_GROWN - len(self._target.grown)
            self._target.grown += [bytes.fromhex(one) for one in done["grown"][:room]]
            return end
        # The results of the chunk are lost with the child, except for the input that ended it.
        number: int = struct.unpack("<q", self._progress[:8])[0]
        killed = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exit"
        kind = "hang" if killed == "SIGALRM" else "crash"
        data = self._input(number)
        self._findings.append({"kind": kind, "what": killed, "input": data.hex()[:4000]})
        if number > first:
            self._chunk(first, number)
        return number + 1

    def _input(self, number: int) -> bytes:
        target = self._target
        rng = random.Random(f"{self._seed} {target.name} {number}")
        seeds = target.seeds + target.grown
        return target.change(rng, rng.choice(seeds), seeds)

    def _work(self, first: int, end: int) -> dict[str, Any]:
        """In the child: reads the inputs, and collects outcomes, findings and new lines."""
        self._progress[:8] = struct.pack("<q", first)
        self._warm_up()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
        outcomes: Counter[str] = Counter()
        findings, grown = [], []
        lines = set(self._lines)
        for number in range(first, end):
            self._progress[:8] = struct.pack("<q", number)
            data = self._input(number)
            seen: Lines = set()
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)
            outcome, finding = self._read(data, seen if number % TRACE_EVERY == 0 else None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            outcomes[outcome] += 1
            if finding is not None:
                findings.append({"kind": outcome, "what": finding, "input": data.hex()[:4000]})
            if seen - lines:
                lines |= seen
                grown.append(data.hex())
        new = sorted(lines - self._lines)
        return {"outcomes": outcomes, "findings": findings, "lines": new, "grown": grown}

    def _warm_up(self) -> None:
        """Reads some seeds, then limits the address space to what is in use and a margin."""
        faulthandler.disable()  # of pytest: a crash is reported by the parent
        for seed in self._target.seeds[:8]:
            self._read(seed, None)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        margin = MODEL_MARGIN_BYTES if self._is_model else MARGIN_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + margin,) * 2)

    def _read(self, data: bytes, seen: Lines | None) -> tuple[str, str | None]:
        """Outcome of an input, and what was wrong if that is a finding."""
        if seen is not None:
            tracemalloc.start()
            sys.settrace(tracer(seen))
        outcome, finding = "valid", None
        try:
            self._target.read(self._where, data)
        except self._target.refusals as error:
            outcome = type(error).__name__
        except MemoryError as error:
            outcome, finding = "memory", repr(error)[:300]
        except Exception as error:  # noqa: BLE001 - every class is a result here
            outcome, finding = "escape", repr(error)[:300]
        if seen is not None:
            sys.settrace(None)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            if not self._is_model and peak > 2 * len(data) + PYTHON_MARGIN_BYTES:
                outcome, finding = "memory", f"{peak} bytes for an input of {len(data)}"
        return outcome, finding


def tracer(seen: Lines) -> Any:
    """Trace function that adds the executed lines of exl_core to `seen`."""

    def on_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename.rpartition(_CORE)[2], frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        return on_line if _CORE in frame.f_code.co_filename else None

    return on_call


if __name__ == "__main__":
    sys.exit(main())
