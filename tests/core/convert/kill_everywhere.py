"""A program: converts, is killed, and goes on. `kill_everywhere.py SOURCE FOLDER STEP FIRST`.

The libraries are loaded once; every attempt is a process forked from that, which kills itself with
SIGKILL at the n-th time that a file or a folder is to be put on the disk: before a file has its
name, or just after. Then another one goes on, undisturbed. Prints a line of JSON: the points tried,
and those after which the output was not that of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from support import stub_stages
from support.conversions import content, conversion, run


def attempt(source: Path, folder: Path, kill_at: int | None, *, resume: bool) -> int:
    """In a process of its own; its exit status. With `kill_at` 0 it is the number of points."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync
    try:
        stub_stages.install()
        run(conversion(source, folder), resume=resume)
        (folder / "points").write_text(str(count), encoding="ascii")
    finally:
        os._exit(0 if (folder / "out").is_dir() else 3)


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    step, first = int(sys.argv[3]), int(sys.argv[4])
    whole = folder / "whole"
    whole.mkdir()
    assert attempt(source, whole, None, resume=False) == 0
    wanted = content(whole / "out")
    points = range(first, int((whole / "points").read_text(encoding="ascii")) + 1, step)
    failed = []
    for point in points:
        place = folder / f"at-{point}"
        place.mkdir()
        killed = attempt(source, place, point, resume=False)
        is_killed = os.WIFSIGNALED(killed) and os.WTERMSIG(killed) == signal.SIGKILL
        went_on = attempt(source, place, None, resume=True)
        left = {path.name for path in place.iterdir()} - {"out", "points"}
        is_same = went_on == 0 and content(place / "out") == wanted and not left
        if not (is_killed and is_same):
            failed.append(point)
        else:
            shutil.rmtree(place)
    print(json.dumps({"points": list(points), "failed": failed}))


if __name__ == "__main__":
    main()
