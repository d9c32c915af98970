"""SmolLM3: Llama's architecture without RoPE in each fourth layer."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF
from exl_core.arch.spec import ArchSpec, NoRope

SMOLLM3 = ArchSpec(
    name="smollm3",
    hf_names=("SmolLM3ForCausalLM",),
    gguf_names=("smollm3",),
    no_rope=NoRope.INTERVAL,
    rope_base_default=2_000_000.0,
    tie_embeddings_default=True,
    gguf=replace(GGUF, is_interleaved=True),
)
