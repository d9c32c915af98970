"""Llama 1, 2, 3.x and models of the same architecture (SmolLM2, TinyLlama, Vicuna)."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF
from exl_core.arch.spec import ArchSpec

LLAMA = ArchSpec(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    gguf_names=("llama",),
    gguf=replace(GGUF, is_interleaved=True),
)
