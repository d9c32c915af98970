"""Work directory of a conversion: finished results on the disk, file by file.

Every file is written completely or not at all, so that the process can be killed at any time.
A file that exists is finished. A missing file is computed again, with the same bytes. The job file
identifies the conversion that the directory belongs to. A lock keeps other processes out. Knows
neither models nor stages.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from exl_core.errors import ExlError, RequestError
from exl_core.files import (
    TEMPORARY_SUFFIX,
    naming_disk_failures,
    read_json_object,
    write_json,
)
from exl_core.formats.containers.mapped import MappedFile
from exl_core.formats.containers.safetensors import ELEMENT_TYPES, read_header
from exl_core.formats.containers.safetensors_writer import Entry, whole, write_safetensors
from exl_core.formats.containers.source import StoredTensor

JOB_NAME, LOCK_NAME, SCRATCH_NAME = "job.json", "lock", "scratch"
_OWN_NAMES = (LOCK_NAME, JOB_NAME + TEMPORARY_SUFFIX)  # left by a process that was killed early
SCHEMA_VERSION = 3
Facts = Mapping[str, object]


class WorkFileError(RequestError):
    """A file of the work directory has content that no conversion writes."""


class WorkDir:
    """Directory that this process holds exclusively, for the duration of an `open_work` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def write_facts(self, name: str, facts: Facts) -> None:
        write_json(self.folder / name, facts, indent=None)

    def read_facts(self, name: str) -> dict[str, Any]:
        return read_json_object(self.folder / name, WorkFileError, limit_bytes=1 << 30)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        write_safetensors(self.folder / name, [whole(*item) for item in tensors.items()])

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Copies of a file's tensors, aligned like new tensors, so that results are bit-equal."""
        return {entry.name: entry.read() for entry in self.entries(name)}

    def entries(self, name: str) -> list[Entry]:
        """Tensors of a file, which are read only when they are written elsewhere."""
        path = self.folder / name
        file = MappedFile(path)
        return [
            Entry(
                tensor.name,
                ELEMENT_TYPES[tensor.storage],
                tensor.shape,
                partial(_view, file, tensor, offset),
            )
            for tensor, offset in read_header(path)
        ]

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for temporary files, removed at the end of the block."""
        folder = self.folder / SCRATCH_NAME
        with naming_disk_failures(folder):
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder)

    def remove(self, *names: str) -> None:
        with naming_disk_failures(self.folder):
            for name in names:
                (self.folder / name).unlink(missing_ok=True)

    def remove_all(self, last: str) -> None:
        """Removes the directory and all its files. It was empty before the conversion.

        The file `last` and the job are removed at the end, so that a removal that was killed can be
        recognized and resumed.
        """
        kept = (last, JOB_NAME, LOCK_NAME)
        with naming_disk_failures(self.folder):
            for path in sorted(self.folder.iterdir()):
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in kept:
                    path.unlink()
            for name in kept:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()


@contextmanager
def open_work(folder: Path, options: Facts) -> Iterator[WorkDir]:
    """Opens the work directory of the conversion that `options` (plain JSON values) describe.

    A directory that this conversion has begun keeps its files. Raises RequestError if it holds
    another conversion (the message names the options that differ), or if another process holds it.
    """
    with naming_disk_failures(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK_NAME, folder, "in this work directory"):
        for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
            leftover.unlink()  # left by a process that was killed while writing
        shutil.rmtree(folder / SCRATCH_NAME, ignore_errors=True)
        job = folder / JOB_NAME
        if not job.is_file():
            _require_empty(folder)
            write_json(job, {"schema_version": SCHEMA_VERSION, "options": dict(options)})
        else:
            _require_same(job, options)
        yield WorkDir(folder)


def check_work(folder: Path, options: Facts) -> None:
    """Raises the errors of `open_work` for the content of a directory, without changing it."""
    job = folder / JOB_NAME
    if job.is_file():
        _require_same(job, options)
    elif folder.exists():
        _require_empty(folder)


def is_bare(folder: Path) -> bool:
    """Whether the directory exists and has no results of a conversion."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {*_OWN_NAMES, JOB_NAME}


def _require_empty(folder: Path) -> None:
    if not folder.is_dir():
        raise RequestError("the work directory is not a directory", where=folder)
    names = sorted(path.name for path in folder.iterdir() if path.name not in _OWN_NAMES)
    if names:
        raise RequestError(
            "the work directory holds something else",
            where=folder,
            expected="a new directory, or one of a conversion",
            got=names[0],
            next_step="Choose another one with --work.",
        )


def _require_same(job: Path, options: Facts) -> None:
    written = read_json_object(job, WorkFileError)
    if written.get("schema_version") != SCHEMA_VERSION:
        raise WorkFileError(
            "was written by another version of exl",
            where=job,
            next_step="Remove the directory, or finish with the version that began.",
        )
    before = written.get("options")
    before = before if isinstance(before, dict) else {}
    differing = [name for name in {**before, **options} if before.get(name) != options.get(name)]
    if differing:
        raise RequestError(
            "the work directory belongs to an unfinished conversion with another "
            + " and another ".join(differing),
            where=job.parent,
            expected=_values(before, differing),
            got=_values(options, differing),
            next_step="Repeat that command to finish it, choose another directory with --work, or "
            "remove this one to begin anew.",
        )


def _values(options: Facts, names: list[str]) -> str:
    """`length 20, seed 0`; of a single option the value alone, because the message names it."""
    if len(names) == 1:
        return str(options.get(names[0]))
    return ", ".join(f"{name} {options.get(name)}" for name in names)


@contextmanager
def locked(path: Path, target: Path, target_phrase: str) -> Iterator[None]:
    """Holds a lock file that only one process can hold, and removes it at the end.

    The system releases the lock when the process ends, in any way. `target` is the directory that
    the lock protects, and `target_phrase` names it in messages.
    """
    with naming_disk_failures(path):
        file = path.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Otherwise the last owner has just removed the file, and the next one creates another.
            is_ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError as error:
            raise ExlError("cannot be locked", where=path, got=error.strerror) from error
        if not is_ours:
            raise RequestError(
                f"another process is converting {target_phrase}",
                where=target,
                next_step="Wait for it, or choose another directory.",
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _view(file: MappedFile, tensor: StoredTensor, offset: int) -> Iterator[Tensor]:
    """The whole tensor as a view of the mapped file, whose pages are released after use."""
    dtype = ELEMENT_TYPES[tensor.storage]
    yield file.view(offset, tensor.size_bytes, dtype).view(tensor.shape)
    file.release(offset, tensor.size_bytes)
