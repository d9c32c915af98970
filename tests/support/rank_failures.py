"""Groups of ranks that a test hurts: settings of single ranks, and what is left of a group."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.session import ranks
from exl_core.session.load import LoadedModel

MARK = "EXL_TEST_MARK"
"""Variable by which processes are found that a test has started, directly or not."""
LEAVE_S = 5.0
"""Time after a test for what it has ended: the limit of every failure."""


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return state[0] != "Z"


def processes_of(loaded: LoadedModel) -> tuple[int, ...]:
    assert isinstance(loaded.model, LeadingTransformer)
    assert isinstance(loaded.model.followers, Followers)
    return loaded.model.followers.process_ids


def starting_with(
    monkeypatch: pytest.MonkeyPatch, rank: int = 1, **changed: object
) -> list[Followers]:
    """Lets one rank start with other settings. Returns the groups that are made."""
    made: list[Followers] = []

    def start(
        count: int, module: str, settings_of: Callable[[int], Mapping[str, object]], **options: bool
    ) -> Any:
        def own(index: int) -> Mapping[str, object]:
            return {**settings_of(index), **(changed if index == rank else {})}

        made.append(Followers(count, module, own, **options))
        return made[-1]

    monkeypatch.setattr(ranks, "Followers", start)
    return made


def remains() -> set[Path]:
    """Folders in which ranks meet, and shared memory of NCCL."""
    return {*_folders(), *Path("/dev/shm").glob("nccl-*"), *Path("/dev/shm").glob("torch_*")}


@contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Checks that the block leaves no process, no port, no folder and no shared memory behind. Its
    temporary files are in `folder`, since other tests start ranks too."""
    mark, temporary = uuid.uuid4().hex, folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    ports, shared = listening(os.getpid()), _shared_memory()
    yield
    gc.collect()
    until = time.monotonic() + LEAVE_S
    while marked_processes(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not marked_processes(mark), "processes are left"
    assert not _folders(), "folders are left in which ranks met"
    assert not listening(os.getpid()) - ports, "this process still listens"
    assert not {one for one in _shared_memory() - shared if not _is_open(one)}, "shared memory"


def marked_processes(mark: str) -> list[int]:
    """Processes with this mark in the environment in which they were started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it has ended
            continue
        if f"{MARK}={mark}".encode() in environment and is_alive(int(folder.name)):
            found.append(int(folder.name))
    return found


def listening(process: int) -> set[tuple[str, str]]:
    """Address and inode of the TCP sockets on which a process listens."""
    owned = {
        str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()
    }  # the listing's own descriptor is gone already
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                found.add((fields[1], fields[9]))
    return found


def _folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("exl-ranks-*"))


def _shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def _is_open(file: Path) -> bool:
    """Whether a process uses a file of shared memory. It is another program's: those of the test
    have ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            maps = (folder / "maps").read_text(encoding="utf-8", errors="replace")
            links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        if str(file) in maps or str(file) in links:
            return True
    return not file.exists()
