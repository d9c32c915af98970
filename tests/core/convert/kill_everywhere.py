"""Program that kills conversions and resumes them. The last line that it prints is JSON.

    kill_everywhere.py SOURCE FOLDER points STEP FIRST
        kills at every STEP-th time that a file or folder is written to the disk, from the FIRST on:
        before a file has its name, or just after
    kill_everywhere.py SOURCE FOLDER times COUNT
        kills COUNT times at random times, with the real stages

The libraries are loaded once. Every attempt is a forked process that is ended by SIGKILL, and a
second process then resumes. `failed` lists the attempts after which the output differed from that
of an undisturbed run, or other files remained.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import stub_stages
from support.conversions import content, conversion, hooks, run

Convert = Callable[[Path], object]


def forked(convert: Convert, folder: Path) -> int:
    """Id of a process that converts in `folder`. It exits with 0 if there is an output."""
    child = os.fork()
    if child:
        return child
    try:
        convert(folder)
    finally:
        os._exit(0 if (folder / "out").is_dir() else 3)


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def whole_output(convert: Convert, folder: Path) -> dict[str, bytes]:
    assert finish(forked(convert, new(folder))) == 0
    return content(folder / "out")


def is_clean(folder: Path, expected: dict[str, bytes]) -> bool:
    remaining = {path.name for path in folder.iterdir()} - {"out", "points"}
    return not remaining and content(folder / "out") == expected


def at_points(source: Path, folder: Path, step: int, first: int) -> dict[str, object]:
    stub_stages.install()
    kill_at, count, real = 0, 0, os.fsync

    def fsync(fd: Any) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    os.fsync = fsync

    def convert(attempt: Path) -> None:
        run(conversion(source, attempt))
        (attempt / "points").write_text(str(count), encoding="ascii")

    expected = whole_output(convert, folder / "whole")
    last = int((folder / "whole/points").read_text(encoding="ascii"))
    failed = []
    for point in range(first, last + 1, step):
        attempt, kill_at = new(folder / f"at-{point}"), point
        killed = finish(forked(convert, attempt))
        kill_at = 0
        resumed = finish(forked(convert, attempt))
        if (killed, resumed) != (-signal.SIGKILL, 0) or not is_clean(attempt, expected):
            failed.append(point)
        shutil.rmtree(attempt)
    return {"kills": len(range(first, last + 1, step)), "failed": failed}


def at_times(source: Path, folder: Path, num_kills: int) -> dict[str, object]:
    # Imported here, because it loads many libraries.
    from core.convert.test_end_to_end import FAST, make_rows

    def convert(attempt: Path) -> None:
        options = conversion(source, attempt, bits=6.0, rows=2, length=64, stages=FAST)
        run(options, hooks(make_rows=make_rows))

    started = time.monotonic()
    expected = whole_output(convert, folder / "whole")
    seconds = time.monotonic() - started
    rng, kills, outputs, failed = random.Random(20), 0, 0, []
    while kills < num_kills:
        attempt = new(folder / f"run-{outputs}")
        while not (attempt / "out").is_dir():
            child = forked(convert, attempt)
            if kills < num_kills:
                time.sleep(rng.uniform(0, seconds))
                os.kill(child, signal.SIGKILL)
            kills += finish(child) == -signal.SIGKILL
        if (attempt / "out.work").is_dir():  # killed during the removal of work files
            finish(forked(convert, attempt))
        if not is_clean(attempt, expected):
            failed.append(outputs)
        outputs += 1
    return {"kills": kills, "outputs": outputs, "failed": failed}


def main() -> None:
    source, folder, how, *numbers = sys.argv[1:]
    work: dict[str, Callable[..., dict[str, object]]] = {"points": at_points, "times": at_times}
    print(json.dumps(work[how](Path(source), Path(folder), *map(int, numbers))))


if __name__ == "__main__":
    main()
