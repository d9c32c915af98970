"""Granite 3, dense and with experts, Granite 4 without Mamba layers and experts, MiniCPM 1 and 2:
Llama's architecture with multipliers."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, HF, Fused
from exl_core.arch.spec import ArchSpec, ExpertForm

GRANITE = ArchSpec(
    name="granite",
    hf_names=("GraniteForCausalLM",),
    gguf_names=("granite",),
    has_multipliers=True,
    gguf=replace(GGUF, is_interleaved=True),
)

GRANITE4 = replace(
    GRANITE,
    name="granite4",
    hf_names=("GraniteMoeHybridForCausalLM",),
    gguf_names=(),
    intermediate_size_key="shared_intermediate_size",
    required=(
        ("layer_types", ("attention", "full_attention")),
        ("num_local_experts", (0,)),
        ("position_embedding_type", ("rope",)),
    ),
    safetensors=replace(
        HF,
        names={**HF.names, "down": "shared_mlp.output_linear"},
        fused=(Fused("shared_mlp.input_linear", ("gate", "up")),),
    ),
)

GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    hf_names=("GraniteMoeForCausalLM",),
    gguf_names=("granitemoe",),
    experts=ExpertForm(
        num_experts_keys=("num_local_experts",), size_key="intermediate_size", top_k_default=2
    ),
    safetensors=replace(
        HF,
        names={**HF.names, "router": "block_sparse_moe.router.layer"},
        aliases={"expert_down": ("block_sparse_moe.output_linear",)},
        fused=(
            *HF.fused,
            Fused("block_sparse_moe.input_linear", ("expert_gate", "expert_up")),
        ),
    ),
)
"""Router: softmax over the logits of the chosen experts, which is the softmax over all, normalized
over those chosen. One tensor holds the matrices of all experts."""

MINICPM = ArchSpec(
    name="minicpm",
    hf_names=("MiniCPMForCausalLM",),
    gguf_names=("minicpm",),
    has_multipliers=True,
    tie_embeddings_default=True,
    gguf=replace(GGUF, is_interleaved=True),
)
