"""Granite 3, dense and with experts, MiniCPM 1 and 2: Llama's architecture with multipliers.

Granite 4 is the same, with layers of Mamba-2 in the hybrids.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, HF, MAMBA2_GGUF_NAMES, Fused
from exl_core.arch.spec import ArchSpec, ExpertForm, NoRope, Recurrence

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
    gguf_names=("granitehybrid",),
    intermediate_size_key="shared_intermediate_size",
    recurrence=Recurrence.MAMBA2,
    no_rope=NoRope.STATED,
    experts=ExpertForm(
        num_experts_keys=("num_local_experts",),
        size_key="intermediate_size",
        top_k_default=2,
        shared_size_key="shared_intermediate_size",
        is_optional=True,
    ),
    safetensors=replace(
        HF,
        names={
            **HF.names,
            "down": "shared_mlp.output_linear",
            "shared_down": "shared_mlp.output_linear",
            "router": "block_sparse_moe.router.layer",
            "mixer_in": "mamba.in_proj",
            "taps": "mamba.conv1d",
            "decay": "mamba.A_log",
            "step_bias": "mamba.dt_bias",
            "skip": "mamba.D",
            "mixer_norm": "mamba.norm",
            "mixer_out": "mamba.out_proj",
        },
        aliases={"expert_down": ("block_sparse_moe.output_linear",)},
        fused=(
            Fused("shared_mlp.input_linear", ("gate", "up")),
            Fused("shared_mlp.input_linear", ("shared_gate", "shared_up")),
            Fused("block_sparse_moe.input_linear", ("expert_gate", "expert_up")),
        ),
        bare=("router_bias", "decay", "step_bias", "skip"),
    ),
    gguf=replace(
        GRANITE.gguf,
        names={**GGUF.names, **MAMBA2_GGUF_NAMES},
        bare=("router_bias", "decay", "step_bias", "skip"),
        decays=("decay",),
    ),
)
"""Layers of Mamba-2 have a shared MLP and, in the models with experts, those beside it. GGUF files
of models without such layers have the architecture name `granite`."""

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
