"""Reads pickled weights (`.bin`, `.pt`, `.pth`) and writes them as safetensors, in its own process.

    python -m exl_core.convert.unpickle SOURCE TARGET SHARD_BYTES

Reading a pickle may run code. torch's restricted unpickler (`weights_only=True`) accepts tensors
and plain containers only, and this process holds nothing else that is worth protecting. An error is
one line on stderr and the exit code of its class.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from exl_core.convert.publish import write_weights
from exl_core.errors import ExlError, ModelNotFoundError, UnsupportedModelError, WeightFileError
from exl_core.files import read_json_object
from exl_core.formats.containers.safetensors_writer import TYPE_NAMES, Entry, whole

INDEX_NAME = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth")
STEM = "model"  # of the written files
OTHER_STEMS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")


def pickle_files(directory: Path) -> list[Path]:
    """Pickled weight files of a model: those of its index, or all of one suffix."""
    index = directory / INDEX_NAME
    if index.is_file():
        entries = read_json_object(index, WeightFileError).get("weight_map")
        names = set(entries.values()) if isinstance(entries, dict) else set()
        odd = [n for n in names if not isinstance(n, str) or Path(n).name != n]
        if odd or not names:
            raise WeightFileError("is not a weight index of this folder", where=index)
        return sorted(directory / name for name in names)
    for suffix in SUFFIXES:
        files = [
            path
            for path in sorted(directory.glob(f"*{suffix}"))
            if not path.stem.startswith(OTHER_STEMS)
        ]
        if files:
            return files
    raise ModelNotFoundError(
        "directory holds no pickled weights",
        where=directory,
        expected=", ".join(f"*{suffix}" for suffix in SUFFIXES),
    )


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of one file by name. Files in torch's zip format are mapped, not read."""
    try:
        is_zip = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0][:200]
        what = "holds more than tensors, or is no pickle, and is not read"
        raise UnsupportedModelError(what, where=path, got=reason) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise WeightFileError("cannot be read", where=path, got=str(error)[:200]) from error
    if not isinstance(loaded, dict) or not loaded:
        raise UnsupportedModelError("is no table of tensors", where=path, got=type(loaded).__name__)
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UnsupportedModelError(
                f"entry {str(name)[:80]!r} is no tensor", where=path, got=type(tensor).__name__
            )
        if tensor.dtype not in TYPE_NAMES or tensor.layout is not torch.strided:
            raise UnsupportedModelError(
                f"tensor {name!r} has a type that safetensors files cannot have",
                where=path,
                got=tensor.dtype,
            )
    return loaded


def unpickle(source: Path, target: Path, shard_bytes: int) -> None:
    """Writes the pickled weights of `source` as safetensors files to the new directory `target`."""
    entries: dict[str, Entry] = {}
    for path in pickle_files(source):
        for name, tensor in read_pickle(path).items():
            if name in entries:
                raise WeightFileError(f"tensor {name!r} is also in another file", where=path)
            entries[name] = whole(name, tensor)
    write_weights(target, list(entries.values()), shard_bytes, STEM)


def main(arguments: list[str]) -> int:
    source, target, shard_bytes = arguments
    try:
        unpickle(Path(source), Path(target), int(shard_bytes))
    except ExlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
