"""Phi-3, Phi-3.5 and Phi-4 text models: Llama's shapes; q, k, v and gate, up are stored as one.

Not those whose RoPE is scaled by `longrope` (the contexts of 128k).
"""

from __future__ import annotations

from exl_core.arch.spec import ArchSpec, Window

PHI3 = ArchSpec(
    name="phi3",
    hf_names=("Phi3ForCausalLM",),
    gguf_names=(),
    window_pattern=(Window.LOCAL,),
)
