"""Qwen 2, 2.5 and 3, their models with experts: Llama's architecture with biases on q, k, v, or
with head norms.

The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL are the same: for text alone, their RoPE of
three sections is the usual one. Checkpoints give a window size, and `use_sliding_window` says
whether it is used.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm
from exl_core.arch.names import HF, MULTIMODAL_ROOTS, Fused
from exl_core.arch.spec import ArchSpec, ExpertForm, Window

QWEN2 = ArchSpec(
    name="qwen2",
    hf_names=(
        "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    gguf_names=("qwen2", "qwen2vl"),
    has_qkv_bias=True,
    window_pattern=(Window.LOCAL,),
    window_flag="use_sliding_window",
    safetensors=replace(HF, roots=MULTIMODAL_ROOTS),
)

QWEN3 = ArchSpec(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
    gguf_names=("qwen3", "qwen3vl"),
    head_norm=HeadNorm.RMS,
    window_pattern=(Window.LOCAL,),
    window_flag="use_sliding_window",
    safetensors=replace(HF, roots=MULTIMODAL_ROOTS),
    head_dim_default=128,
)

QWEN2_MOE = replace(
    QWEN2,
    name="qwen2moe",
    hf_names=("Qwen2MoeForCausalLM",),
    gguf_names=("qwen2moe",),
    experts=ExpertForm(
        normalizes=None,
        gguf_normalizes=False,
        shared_size_key="shared_expert_intermediate_size",
        has_shared_gate=True,
    ),
    safetensors=replace(
        HF,
        names={
            **HF.names,
            "shared_gate": "mlp.shared_expert.gate_proj",
            "shared_up": "mlp.shared_expert.up_proj",
            "shared_down": "mlp.shared_expert.down_proj",
            "shared_router": "mlp.shared_expert_gate",
        },
    ),
)
"""Router: softmax over all experts, as a rule not normalized. The shared expert has a score of its
own."""

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3moe",
    hf_names=("Qwen3MoeForCausalLM",),
    gguf_names=("qwen3moe",),
    experts=ExpertForm(normalizes=None),
    safetensors=HF,
)
"""Router: softmax over all experts. Layers of `mlp_only_layers` are dense."""

QWEN3_VL_MOE = replace(
    QWEN3,
    name="qwen3vlmoe",
    hf_names=("Qwen3VLMoeForConditionalGeneration",),
    gguf_names=("qwen3vlmoe",),
    is_tied_by_outer=True,
    experts=ExpertForm(),
    safetensors=replace(
        HF,
        roots=MULTIMODAL_ROOTS,
        aliases={"expert_down": ("mlp.experts.down_proj",)},
        fused=(
            *HF.fused,
            Fused("mlp.experts.gate_up_proj", ("expert_gate", "expert_up"), is_bare=True),
        ),
        bare=("mlp.experts.down_proj",),
        transposable=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
)
"""Router: softmax over all experts, normalized over those chosen. One tensor holds the matrices of
all experts."""
