"""Granite 3 and MiniCPM 1 and 2: Llama's architecture with multipliers."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF
from exl_core.arch.spec import ArchSpec

GRANITE = ArchSpec(
    name="granite",
    hf_names=("GraniteForCausalLM",),
    gguf_names=("granite",),
    has_multipliers=True,
    gguf=replace(GGUF, is_interleaved=True),
)

MINICPM = ArchSpec(
    name="minicpm",
    hf_names=("MiniCPMForCausalLM",),
    gguf_names=("minicpm",),
    has_multipliers=True,
    tie_embeddings_default=True,
    gguf=replace(GGUF, is_interleaved=True),
)
