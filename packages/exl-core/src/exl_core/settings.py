"""Environment variables. Only this module reads them; all others take their options as
arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import RequestError

INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "avx512vnni", "amx")
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """`EXL_ISA`: instruction set to use (default: the best that the CPU supports). `EXL_THREADS`:
    number of CPU threads (default: all cores that this process may use)."""

    isa: str | None
    threads: int


def read_settings() -> Settings:
    isa = os.environ.get("EXL_ISA") or None
    if isa is not None and isa not in INSTRUCTION_SETS:
        raise RequestError(
            "EXL_ISA names no instruction set",
            expected=" or ".join(INSTRUCTION_SETS),
            got=isa,
            next_step="Without it the best that the CPU has is taken.",
        )
    text = os.environ.get("EXL_THREADS")
    threads = _as_thread_count(text) if text else min(available_cpus(), MAX_THREADS)
    return Settings(isa=isa, threads=threads)


def server_key() -> str | None:
    """`EXL_API_KEY`: API key that clients of the server must send, unless an option sets one."""
    return os.environ.get("EXL_API_KEY") or None


def state_folder() -> Path:
    """Folder for the program's state files: below `XDG_STATE_HOME`, or else below the home
    directory."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "")
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111 - never raises
    return base / "exl"


def available_cpus() -> int:
    """Number of cores that this process may use (Linux), or of all cores on other systems."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _as_thread_count(text: str) -> int:
    is_short_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_THREADS))
    if is_short_number and 1 <= int(text) <= MAX_THREADS:
        return int(text)
    raise RequestError(
        "EXL_THREADS is not a thread count",
        expected=f"1 to {MAX_THREADS}",
        got=text,
        next_step="Without it all cores that this process may use are taken.",
    )
