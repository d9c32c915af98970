"""ERNIE 4.5 (dense): Llama's architecture with interleaved RoPE pairs, in checkpoints and in GGUF
files."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec

ERNIE4_5 = ArchSpec(
    name="ernie4_5",
    hf_names=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    gguf_names=("ernie4_5",),
    bias_key="use_bias",
    mlp_bias_key="use_bias",
    head_dim_default=128,
    rope_base_default=500_000.0,
    norm_eps_default=1e-5,
    tie_embeddings_default=True,
    safetensors=replace(HF, is_interleaved=True),
    gguf=replace(GGUF, is_interleaved=True),
)
