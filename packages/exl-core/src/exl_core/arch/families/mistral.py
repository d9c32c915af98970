"""Mistral: Llama's architecture, with a window in every layer if the checkpoint has a window size.

Its GGUF files use the architecture name `llama`.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import HF, MULTIMODAL_ROOTS
from exl_core.arch.spec import ArchSpec, Window

MISTRAL = ArchSpec(
    name="mistral",
    hf_names=(
        "MistralForCausalLM",
        "Mistral3ForConditionalGeneration",
    ),  # the latter: language model only
    gguf_names=(),
    window_pattern=(Window.LOCAL,),
    sliding_window_default=4096,
    num_q_heads_default=32,
    num_kv_heads_default=8,
    safetensors=replace(HF, roots=MULTIMODAL_ROOTS),
)
