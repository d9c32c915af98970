"""Whatever fails or dies under a conversion: nothing broken under the final name; it goes on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exl_core.errors import DiskFullError, ExlError
from support.conversions import COMMAND, content, conversion, run

PROGRAM = Path(__file__).with_name("kill_everywhere.py")
SUPPORT = Path(__file__).resolve().parents[2]


def killed_at(source: Path, folder: Path, step: int, first: int) -> dict[str, list[int]]:
    path = os.pathsep.join([str(SUPPORT), str(PROGRAM.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, PROGRAM, source, folder, str(step), str(first)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_at_some_points_it_goes_on_to_the_same_bytes(
    source_dir: Path, tmp_path: Path
) -> None:
    result = killed_at(source_dir, tmp_path, step=30, first=1)
    assert len(result["points"]) >= 3
    assert not result["failed"]


@pytest.mark.slow
def test_killed_at_every_point_it_goes_on_to_the_same_bytes(
    source_dir: Path, tmp_path: Path
) -> None:
    result = killed_at(source_dir, tmp_path, step=1, first=1)
    assert len(result["points"]) > 60
    assert not result["failed"]


class Disk:
    """Stands between the program and the disk: the n-th call fails, all others are counted."""

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
    """Tries every `step`-th call; how many those were."""
    whole = content(run(conversion(source, folder, out=folder / "whole")))
    points = range(first, disk.count, step)
    for point in points:
        wanted = conversion(source, folder, out=folder / f"at-{point}")
        disk.count, disk.fail_at = 0, point
        with pytest.raises(DiskFullError) as caught:
            run(wanted)
        assert disk.count >= point
        assert "\n" not in str(caught.value)
        if (wanted.work_folder / "job.json").exists():
            assert COMMAND in str(caught.value), point
        disk.fail_at = None
        out = run(wanted, resume=True)
        assert content(out) == whole, point
        assert not wanted.work_folder.exists()
    return len(points)


def test_a_disk_that_is_full_at_some_points(disk: Disk, source_dir: Path, tmp_path: Path) -> None:
    assert fail_everywhere(disk, source_dir, tmp_path, step=23, first=2) >= 3


@pytest.mark.slow
def test_a_disk_that_is_full_at_every_point(disk: Disk, source_dir: Path, tmp_path: Path) -> None:
    assert fail_everywhere(disk, source_dir, tmp_path, step=1, first=2) > 80


def test_a_disk_that_fails_otherwise(disk: Disk, source_dir: Path, tmp_path: Path) -> None:
    wanted = conversion(source_dir, tmp_path)
    disk.fail_at, disk.error = 30, errno.EIO
    with pytest.raises(ExlError, match="cannot be written") as caught:
        run(wanted)
    assert caught.value.exit_code == 1
    disk.fail_at = None
    assert run(wanted, resume=True).is_dir()
