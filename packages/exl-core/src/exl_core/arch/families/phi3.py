"""Phi-3, Phi-3.5 and Phi-4 text models: Llama's architecture with fused q, k, v and gate, up.

Models whose RoPE is scaled by `longrope` (contexts of 128k) are not supported.
"""

from __future__ import annotations

from exl_core.arch.spec import ArchSpec, Window

PHI3 = ArchSpec(
    name="phi3",
    hf_names=("Phi3ForCausalLM",),
    gguf_names=(),
    window_pattern=(Window.LOCAL,),
)
