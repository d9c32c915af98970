"""Kills and disk faults during a conversion: the output is never damaged, the job can resume."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from exl_core.convert.events import Stage
from exl_core.convert.job import Hooks
from exl_core.errors import DiskFullError, ExlError
from support.conversions import COMMAND, content, conversion, hooks, run

PROGRAM = Path(__file__).with_name("kill_everywhere.py")
SUPPORT = Path(__file__).resolve().parents[2]


def killed(source: Path, folder: Path, *how: object) -> dict[str, Any]:
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    done = subprocess.run(
        [sys.executable, PROGRAM, source, folder, *map(str, how)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_resume_after_kill_at_some_writes_gives_same_bytes(
    source_dir: Path, tmp_path: Path
) -> None:
    result = killed(source_dir, tmp_path, "points", 30, 1)
    assert result["kills"] >= 3
    assert not result["failed"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_resume_after_kill_at_every_write_gives_same_bytes(
    source_dir: Path, tmp_path: Path
) -> None:
    result = killed(source_dir, tmp_path, "points", 1, 1)
    assert result["kills"] > 60
    assert not result["failed"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_resume_after_random_kills_gives_same_bytes(source_dir: Path, tmp_path: Path) -> None:
    """Runs the real stages, which compute."""
    result = killed(source_dir, tmp_path, "times", 20)
    assert result["kills"] == 20
    assert result["outputs"] >= 2
    assert not result["failed"]


class Disk:
    """Replaces calls that change the disk: counts them, and lets the n-th one fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fail_at: int | None = None
        self.error = errno.ENOSPC
        self._wrap(monkeypatch, os, "fsync")
        self._wrap(monkeypatch, Path, "replace")
        self._wrap(monkeypatch, Path, "mkdir")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        real: Callable[..., object] = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            self.count += 1
            if self.count == self.fail_at:
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


@pytest.fixture
def disk(stubs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)


def fail_everywhere(disk: Disk, source: Path, folder: Path, step: int, first: int) -> int:
    """Fails every `step`-th disk call from `first` on, and resumes. Returns how often."""
    whole = content(run(conversion(source, folder, out=folder / "whole")))
    points = range(first, disk.count, step)
    for point in points:
        task = conversion(source, folder, out=folder / f"at-{point}")
        disk.count, disk.fail_at = 0, point
        with pytest.raises(DiskFullError) as caught:
            run(task)
        assert disk.count >= point
        assert "\n" not in str(caught.value)
        if (task.work_folder / "job.json").exists():
            assert COMMAND in str(caught.value), point
        disk.fail_at = None
        out = run(task)
        assert content(out) == whole, point
        assert not task.work_folder.exists()
    return len(points)


@pytest.mark.thorough
def test_full_disk_at_some_calls(disk: Disk, source_dir: Path, tmp_path: Path) -> None:
    assert fail_everywhere(disk, source_dir, tmp_path, step=23, first=2) >= 3


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_full_disk_at_every_call(disk: Disk, source_dir: Path, tmp_path: Path) -> None:
    assert fail_everywhere(disk, source_dir, tmp_path, step=1, first=2) > 80


def test_disk_io_error_is_resumable(disk: Disk, source_dir: Path, tmp_path: Path) -> None:
    task = conversion(source_dir, tmp_path)
    disk.fail_at, disk.error = 30, errno.EIO
    with pytest.raises(ExlError, match="cannot be written") as caught:
        run(task)
    assert caught.value.exit_code == 1
    disk.fail_at = None
    assert run(task).is_dir()


def hooks_at(stage: Stage, action: Callable[[], None]) -> Hooks:
    """Hooks that call `action` when `stage` begins."""
    return hooks(
        on_event=lambda event: action() if (event.kind, event.stage) == ("stage", stage) else None
    )


@pytest.mark.parametrize("stage", [Stage.MEASURE, Stage.QUANTIZE, Stage.WRITE])
def test_file_size_limit_is_reported_as_full_disk(
    stage: Stage, stubs: None, source_dir: Path, tmp_path: Path
) -> None:
    """Uses a limit of the operating system, as `ulimit -f` sets it."""
    task, before = conversion(source_dir, tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = hooks_at(stage, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1])))
    try:
        with pytest.raises(DiskFullError, match="File too large"):
            run(task, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not task.out.exists()
    assert run(task).is_dir()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB. Skips the test if none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # files may still be mapped


@pytest.mark.parametrize("stage", [Stage.CALIBRATE, Stage.QUANTIZE, Stage.WRITE])
def test_disk_filled_by_another_process(
    stage: Stage, stubs: None, source_dir: Path, small_disk: Path
) -> None:
    task, filler = conversion(source_dir, small_disk), small_disk / "filler"

    def fill() -> None:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with pytest.raises(DiskFullError, match="No space left") as caught:
        run(task, hooks_at(stage, fill))
    assert COMMAND in str(caught.value)
    filler.unlink()
    assert run(task).is_dir()
    assert [path.name for path in small_disk.iterdir()] == ["out"]
