"""Phi-3, Phi-3.5 and Phi-4 text models: Llama's architecture with fused q, k, v and gate, up.

GGUF files store gate and up as `ffn_up`.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, Fused
from exl_core.arch.spec import ArchSpec, Window

PHI3 = ArchSpec(
    name="phi3",
    hf_names=("Phi3ForCausalLM",),
    gguf_names=("phi3",),
    window_pattern=(Window.LOCAL,),
    gguf=replace(
        GGUF,
        fused=(Fused("attn_qkv", ("q", "k", "v")), Fused("ffn_up", ("gate", "up"))),
    ),
)
