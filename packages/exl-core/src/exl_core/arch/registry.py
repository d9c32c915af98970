"""Table of supported architectures, and the error for one that is not supported."""

from __future__ import annotations

from collections.abc import Iterable

from exl_core.arch.families.gemma2 import GEMMA2
from exl_core.arch.families.gemma3 import GEMMA3
from exl_core.arch.families.llama import LLAMA
from exl_core.arch.families.mistral import MISTRAL
from exl_core.arch.families.phi3 import PHI3
from exl_core.arch.families.qwen import QWEN2, QWEN3
from exl_core.arch.families.seed_oss import SEED_OSS
from exl_core.arch.spec import ArchSpec
from exl_core.errors import UnsupportedModelError

ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, SEED_OSS)


def find_by_hf_name(name: str, *, where: object) -> ArchSpec:
    """The family whose `architectures` entry in `config.json` is `name`."""
    return _find(name, ((spec, spec.hf_names) for spec in ARCHITECTURES), where)


def find_by_gguf_name(name: str, *, where: object) -> ArchSpec:
    """The family whose `general.architecture` in a GGUF file is `name`."""
    return _find(name, ((spec, spec.gguf_names) for spec in ARCHITECTURES), where)


def _find(
    name: str, candidates: Iterable[tuple[ArchSpec, tuple[str, ...]]], where: object
) -> ArchSpec:
    known: list[str] = []
    for spec, names in candidates:
        if name in names:
            return spec
        known.extend(names)
    raise UnsupportedModelError(
        f"architecture {name!r} is not supported",
        where=where,
        next_step=f"Supported: {', '.join(known)}.",
    )
