"""ERNIE 4.5, dense and with experts: Llama's architecture with interleaved RoPE pairs, in
checkpoints and in GGUF files."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import RouterBias
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, ExpertForm

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

ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5-moe",
    hf_names=("Ernie4_5_MoeForCausalLM",),
    gguf_names=("ernie4_5-moe",),
    experts=ExpertForm(
        num_experts_keys=("moe_num_experts", "num_experts"),
        top_k_key="moe_k",
        bias=RouterBias.CHOICE,
        eps=1e-12,
        shared_count_key="moe_num_shared_experts",
    ),
    safetensors=replace(
        ERNIE4_5.safetensors,
        names={
            **ERNIE4_5.safetensors.names,
            "router_bias": "mlp.moe_statics.e_score_correction_bias",
        },
    ),
)
"""Router: softmax over all experts; a bias chooses. The first layers are dense."""
