"""Copies a model with its tensors unchanged: to weight files of another size, or out of pickles.

The copy is made beside its final name, read back and then renamed, as the output of a conversion.
Pickles are read by a child process (`unpickle.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from exl_core.convert.publish import ReadBackError, digest, partial_of, publish, write_weights
from exl_core.convert.side_files import WEIGHT_SUFFIXES, SideFiles
from exl_core.convert.unpickle import STEM
from exl_core.errors import RequestError, UnsupportedModelError
from exl_core.formats.containers.safetensors import ELEMENT_TYPES, SafetensorsSource
from exl_core.formats.containers.safetensors_writer import Entry


def repack(source: Path, out: Path, shard_bytes: int, *, from_bin: bool = False) -> int:
    """Writes the model of the directory `source` to `out`. Returns the number of weight files.

    `shard_bytes` limits the values of one file. `from_bin`: the weights are pickles. Raises
    `RequestError` for an output that exists, and `ModelError` for a fault of the source.
    """
    if not source.is_dir():
        raise RequestError("is no model directory", where=source)
    if os.path.lexists(out) or partial_of(out).exists():
        raise RequestError(
            "the output exists already", where=out, next_step="Choose another -o, or remove it."
        )
    partial = partial_of(out)
    try:
        if from_bin:
            _unpickle_in_child(source, partial, shard_bytes)
        else:
            _copy(SafetensorsSource(source), partial, shard_bytes)
        files = len(list(partial.glob("*.safetensors")))
        kept = (path for path in sorted(source.iterdir()) if path.is_file())
        side_files = tuple(path for path in kept if not path.name.endswith(WEIGHT_SUFFIXES))
        SideFiles(side_files, {}).write(partial)
        SafetensorsSource(partial)
        publish(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return files


def _copy(source: SafetensorsSource, folder: Path, shard_bytes: int) -> None:
    digests: dict[str, str] = {}

    def pieces(name: str) -> Iterator[Tensor]:
        source.prefetch(name)
        tensor = source.read_raw(name)
        digests[name] = digest(tensor)
        yield tensor
        source.release(name)

    entries = []
    for name, stored in source.tensors.items():
        dtype = ELEMENT_TYPES.get(stored.storage)
        if dtype is None:
            raise UnsupportedModelError(
                f"tensor {name!r} has an element type that cannot be copied",
                where=stored.file,
                got=stored.storage,
            )
        entries.append(Entry(name, dtype, stored.shape, lambda name=name: pieces(name)))  # type: ignore[misc]
    write_weights(folder, entries, shard_bytes, STEM)
    copy = SafetensorsSource(folder)
    for name, expected in digests.items():
        found = digest(copy.read_raw(name))
        copy.release(name)
        if found != expected:
            raise ReadBackError(
                f"tensor {name!r} reads back differently", where=copy.tensors[name].file
            )


def _unpickle_in_child(source: Path, folder: Path, shard_bytes: int) -> None:
    command = [sys.executable, "-m", "exl_core.convert.unpickle"]
    arguments = [str(source), str(folder), str(shard_bytes)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UnsupportedModelError(
            "the pickled weights cannot be converted",
            where=source,
            got=lines[-1] if lines else f"exit code {done.returncode}",
        )
