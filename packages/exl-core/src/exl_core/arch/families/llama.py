"""Llama 1, 2, 3.x and models of the same architecture (SmolLM2, TinyLlama, Vicuna, Yi)."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec

LLAMA = ArchSpec(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    gguf_names=("llama",),
    gguf=replace(GGUF, is_interleaved=True),
)

YI = replace(
    LLAMA,
    name="yi",
    hf_names=("YiForCausalLM",),
    gguf_names=(),  # its GGUF files use the architecture name `llama`
    safetensors=replace(HF, aliases={"attention_norm": ("ln1",), "mlp_norm": ("ln2",)}),
)
"""Yi before its checkpoints were renamed to Llama. The oldest ones name the norms differently."""
