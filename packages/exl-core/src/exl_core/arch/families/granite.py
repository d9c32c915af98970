"""Granite 3, Granite 4 without Mamba layers and experts, MiniCPM 1 and 2: Llama's architecture with
multipliers."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, HF, Fused
from exl_core.arch.spec import ArchSpec

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

MINICPM = ArchSpec(
    name="minicpm",
    hf_names=("MiniCPMForCausalLM",),
    gguf_names=("minicpm",),
    has_multipliers=True,
    tie_embeddings_default=True,
    gguf=replace(GGUF, is_interleaved=True),
)
