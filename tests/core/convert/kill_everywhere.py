"""A program: converts, is killed, and goes on. The last line that it prints is JSON.

    kill_everywhere.py SOURCE FOLDER points STEP FIRST
        at every STEP-th time that a file or a folder is to be put on the disk, from the FIRST on:
        before a file has its name, or just after
    kill_everywhere.py SOURCE FOLDER times COUNT
        COUNT times at random moments, with the stages that really compute

The libraries are loaded once; every attempt is a process forked from that, which SIGKILL ends.
Then another one goes on. `failed` lists those after which the output was not that of an undisturbed
run, or something else was left.
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

from support import stub_stages
from support.conversions import content, conversion, hooks, run

Convert = Callable[[Path, bool], object]


def forked(convert: Convert, folder: Path, *, resume: bool) -> int:
    """The process that converts in `folder`; it ends with 0 where there is an output."""
    child = os.fork()
    if child:
        return child
    try:
        convert(folder, resume)
    finally:
        os._exit(0 if (folder / "out").is_dir() else 3)


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def whole_output(convert: Convert, folder: Path) -> dict[str, bytes]:
    assert finish(forked(convert, new(folder), resume=False)) == 0
    return content(folder / "out")


def is_clean(folder: Path, wanted: dict[str, bytes]) -> bool:
    left = {path.name for path in folder.iterdir()} - {"out", "points"}
    return not left and content(folder / "out") == wanted


def at_points(source: Path, folder: Path, step: int, first: int) -> dict[str, object]:
    stub_stages.install()
    kill_at, count, real = 0, 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync

    def convert(place: Path, resume: bool) -> None:
        run(conversion(source, place), resume=resume)
        (place / "points").write_text(str(count), encoding="ascii")

    wanted = whole_output(convert, folder / "whole")
    last = int((folder / "whole/points").read_text(encoding="ascii"))
    failed = []
    for point in range(first, last + 1, step):
        place, kill_at = new(folder / f"at-{point}"), point
        killed = finish(forked(convert, place, resume=False))
        kill_at = 0
        went_on = finish(forked(convert, place, resume=True))
        if (killed, went_on) != (-signal.SIGKILL, 0) or not is_clean(place, wanted):
            failed.append(point)
        shutil.rmtree(place)
    return {"kills": len(range(first, last + 1, step)), "failed": failed}


def at_times(source: Path, folder: Path, wanted_kills: int) -> dict[str, object]:
    from core.convert.test_end_to_end import FAST, make_rows  # which loads far more

    def convert(place: Path, resume: bool) -> None:
        asked = conversion(source, place, bits=6.0, rows=2, length=64, stages=FAST)
        run(asked, hooks(make_rows=make_rows), resume=resume)

    started = time.monotonic()
    wanted = whole_output(convert, folder / "whole")
    seconds = time.monotonic() - started
    moments, kills, outputs, failed = random.Random(20), 0, 0, []
    while kills < wanted_kills:
        place, is_begun = new(folder / f"run-{outputs}"), False
        while not (place / "out").is_dir():
            child = forked(convert, place, resume=is_begun)
            is_begun = True
            if kills < wanted_kills:
                time.sleep(moments.uniform(0, seconds))
                os.kill(child, signal.SIGKILL)
            kills += finish(child) == -signal.SIGKILL
        if (place / "out.work").is_dir():  # killed while it cleaned up
            finish(forked(convert, place, resume=True))
        if not is_clean(place, wanted):
            failed.append(outputs)
        outputs += 1
    return {"kills": kills, "outputs": outputs, "failed": failed}


def main() -> None:
    source, folder, how, *numbers = sys.argv[1:]
    work = {"points": at_points, "times": at_times}[how]
    print(json.dumps(work(Path(source), Path(folder), *map(int, numbers))))


if __name__ == "__main__":
    main()
