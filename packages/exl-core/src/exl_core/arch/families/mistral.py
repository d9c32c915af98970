"""Mistral: Llama's architecture, with a window in every layer if the checkpoint has a window size.

Its GGUF files use the architecture name `llama`.
"""

from __future__ import annotations

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
    key_roots=("model.", "language_model.model.", "model.language_model."),
)
