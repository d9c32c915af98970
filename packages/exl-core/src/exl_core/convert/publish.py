"""Output of a conversion: finished tensors become a loadable directory under its final name.

All files are written to a directory beside the final one, read back from the disk, and compared
with the digests of the finished tensors. Only then is the directory renamed. Weight files have the
names that the format's own converter gives them, with an index for other readers. Knows nothing of
how the tensors were computed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from exl_core.convert.target import Target
from exl_core.errors import ExlError, RequestError
from exl_core.files import naming_disk_failures, sync_folder, write_json
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.containers.safetensors import INDEX_NAME, SafetensorsSource
from exl_core.formats.containers.safetensors_writer import Entry, as_bytes, write_safetensors
from exl_core.formats.verify import verify
from exl_core.session.open import open_checkpoint

PARTIAL_SUFFIX = ".partial"
WEIGHTS_STEM = "output"
SETTINGS_NAME = "quantization_config.json"  # of EXL3
EXL3_VERSION = "1.6.5"
"""Version of exllamav3 whose form the output has."""


class ReadBackError(ExlError):
    """Data read back from the disk differs from the data written."""


def partial_of(out: Path) -> Path:
    """Directory in which the output is assembled before its rename, on the same file system."""
    return out.with_name(out.name + PARTIAL_SUFFIX)


def digest(tensor: Tensor) -> str:
    """SHA-256 of type, shape and values."""
    hasher = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    hasher.update(as_bytes(tensor))
    return hasher.hexdigest()


def plan_shards(entries: Sequence[Entry], limit_bytes: int) -> list[list[Entry]]:
    """Splits the tensors, in order, into files with at most `limit_bytes` of values."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if entry.size_bytes > limit_bytes:
            raise RequestError(
                f"tensor {entry.name!r} is larger than a shard may be",
                expected=f"a shard size of at least {entry.size_bytes} bytes",
                got=limit_bytes,
            )
        if size + entry.size_bytes > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size_bytes
    return shards


def shard_names(count: int, stem: str = WEIGHTS_STEM) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def write_weights(
    folder: Path, entries: Sequence[Entry], limit_bytes: int, stem: str = WEIGHTS_STEM
) -> None:
    """Writes the shards and their index into a new directory; an existing one is replaced."""
    with naming_disk_failures(folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    shards = plan_shards(entries, limit_bytes)
    weight_map: dict[str, str] = {}
    for name, shard in zip(shard_names(len(shards), stem), shards, strict=True):
        write_safetensors(folder / name, shard)
        weight_map |= {entry.name: name for entry in shard}
    total = sum(entry.size_bytes for entry in entries)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def check_written(folder: Path, digests: Mapping[str, str]) -> None:
    """Reads all weights back, compares them with `digests`, and checks the model as a loader does.

    The files are dropped from the page cache first, so that the data comes from the disk where the
    system complies.
    """
    for path in folder.glob("*.safetensors"):
        _drop_from_memory(path)
    source = SafetensorsSource(folder)
    if set(source.tensors) != set(digests):
        differing = sorted(set(source.tensors) ^ set(digests))
        raise ReadBackError("holds other tensors than were written", where=folder, got=differing[0])
    for name, expected_digest in digests.items():
        found = digest(source.read_raw(name))
        source.release(name)
        if found != expected_digest:
            raise ReadBackError(
                f"tensor {name!r} reads back differently",
                where=source.tensors[name].file,
                expected=f"sha256 {expected_digest[:16]}",
                got=found[:16],
                next_step="The disk or the memory of this machine is faulty; run it again with "
                "--resume.",
            )
    report = verify(*open_checkpoint(folder))
    if report.problems:
        raise ReadBackError(
            f"cannot be loaded: {report.problems[0]}",
            where=folder,
            got=f"{len(report.problems)} problems",
        )


def _drop_from_memory(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def publish(folder: Path, out: Path) -> None:
    """Renames `folder` to `out`, which must be missing or empty."""
    with naming_disk_failures(out):
        sync_folder(folder)
        folder.replace(out)
        sync_folder(out.parent)


def quantization_settings(
    target: Target, *, bits: float, head_bits: float, rows: int, length: int, dataset: str
) -> dict[str, object]:
    """`quantization_config` as the format's own converter writes it. No reader needs it."""
    if target.codebook is None:
        return {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": bits,
            "head_bits": head_bits,
            "calibration": {"rows": rows, "length": length, "dataset": dataset},
        }
    return {
        "quant_method": "exl3",
        "version": EXL3_VERSION,
        "bits": bits,
        "head_bits": head_bits,
        "calibration": {"rows": rows, "cols": length},
        "out_scales": "always",
        "codebook": target.codebook,
    }


def tensor_storage(entries: Sequence[Entry]) -> Mapping[str, object]:
    """`tensor_storage` of EXL3's `quantization_config.json`: the stored tensors of each module."""
    modules: dict[str, dict[str, Any]] = {}
    for entry in entries:
        module, _, part = entry.name.rpartition(".")
        found = modules.setdefault(module, {"stored_tensors": {}})
        found["stored_tensors"][entry.name] = {
            "shape": list(entry.shape),
            "n_bytes": entry.size_bytes,
            "dtype": str(entry.dtype),
        }
        if part == "trellis":
            found |= {"quant_format": "exl3", "bits_per_weight": exl3.rate_of(entry.shape[-1])}
        elif part in ("mul1", "mcg"):
            found[f"{part}_multiplier"] = exl3.MULTIPLIERS[part]
    return modules
