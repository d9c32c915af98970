"""Mistral and Mixtral: Llama's architecture, with a window in every layer if the checkpoint has a
window size. Mixtral has experts.

GGUF files of text models use the architecture name `llama`, those of multimodal models `mistral3`.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, HF, MULTIMODAL_ROOTS
from exl_core.arch.spec import ArchSpec, ExpertForm, Window

MISTRAL = ArchSpec(
    name="mistral",
    hf_names=(
        "MistralForCausalLM",
        "Mistral3ForConditionalGeneration",
        "LlavaForConditionalGeneration",  # Pixtral
    ),
    text_types=("mistral",),
    gguf_names=("mistral3",),
    has_query_temperature=True,
    window_pattern=(Window.LOCAL,),
    sliding_window_default=4096,
    hidden_size_default=4096,  # multimodal configurations omit values equal to these defaults
    intermediate_size_default=14336,
    num_layers_default=32,
    vocab_size_default=32000,
    num_q_heads_default=32,
    num_kv_heads_default=8,
    safetensors=replace(HF, roots=MULTIMODAL_ROOTS),
    gguf=replace(GGUF, is_interleaved=True),
)

MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    hf_names=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    text_types=("ministral3",),
    gguf_names=(),
    sliding_window_default=None,
    head_dim_default=128,
    rope_base_default=1_000_000.0,
    norm_eps_default=1e-5,
)
"""Ministral 3 and Devstral Small 2: queries grow with the logarithm of their position."""

MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}

MIXTRAL = ArchSpec(
    name="mixtral",
    hf_names=("MixtralForCausalLM",),
    gguf_names=("llama",),
    window_pattern=(Window.LOCAL,),
    norm_eps_default=1e-5,
    rope_base_default=1_000_000.0,
    experts=ExpertForm(size_key="intermediate_size", top_k_default=2),
    safetensors=replace(
        HF,
        names={**HF.names, **MIXTRAL_NAMES},
        aliases={
            role: (name.replace("block_sparse_moe", "mlp"),) for role, name in MIXTRAL_NAMES.items()
        },
    ),
    gguf=replace(
        GGUF,
        is_interleaved=True,
        # Files of before April 2024 have a tensor for each matrix of an expert.
        aliases={f"expert_{part}": (f"ffn_{part}.{{}}",) for part in ("gate", "up", "down")},
    ),
)
"""Router: softmax over all experts, normalized over those chosen."""
