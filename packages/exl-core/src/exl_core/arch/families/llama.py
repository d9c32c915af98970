"""Llama 1, 2, 3.x and models of the same architecture (SmolLM2, TinyLlama, Vicuna)."""

from __future__ import annotations

from exl_core.arch.spec import ArchSpec

LLAMA = ArchSpec(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    gguf_names=("llama",),
    is_gguf_rope_interleaved=True,
)
