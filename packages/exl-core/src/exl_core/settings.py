"""The only reader of the environment. Everything else takes its choices as arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass

from exl_core.errors import RequestError

INSTRUCTION_SETS = ("scalar", "avx2", "avx512")


@dataclass(frozen=True, slots=True)
class Settings:
    """`EXL_ISA`: force an instruction set (default: the best the CPU has). `EXL_THREADS`: CPU
    threads (default: all cores this process may use)."""

    isa: str | None
    threads: int


def read_settings() -> Settings:
    isa = os.environ.get("EXL_ISA") or None
    if isa is not None and isa not in INSTRUCTION_SETS:
        raise RequestError(
            "EXL_ISA names no instruction set", expected=" or ".join(INSTRUCTION_SETS), got=isa
        )
    text = os.environ.get("EXL_THREADS") or str(len(os.sched_getaffinity(0)))
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise RequestError("EXL_THREADS is not a thread count", expected="1 to 1024", got=text)
    return Settings(isa=isa, threads=int(text))
