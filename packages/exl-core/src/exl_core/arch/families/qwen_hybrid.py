"""Qwen3-Next and Qwen3.5: gated delta nets, and attention with a gate in each fourth layer.

Three quarters of each attention head are not rotated. Norms store their factors minus one, except
that of the delta net's outputs. The layer for multi-token prediction has attention.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm
from exl_core.arch.names import GGUF, HF, MULTIMODAL_ROOTS, Fused, PredictingForm
from exl_core.arch.spec import ArchSpec, ExpertForm, Recurrence

_NAMES = {
    **HF.names,
    "q": "self_attn.query_proj",  # checkpoints of the hub fuse queries and gates
    "q_gate": "self_attn.query_gate_proj",
    **{f"delta_{role}": f"linear_attn.{role}_proj" for role in ("q", "k", "v", "z", "b", "a")},
    "taps": "linear_attn.conv1d",
    "decay": "linear_attn.A_log",
    "step_bias": "linear_attn.dt_bias",
    "mixer_norm": "linear_attn.norm",
    "mixer_out": "linear_attn.out_proj",
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_router": "mlp.shared_expert_gate",
}
_GATED_QUERIES = Fused("self_attn.q_proj", ("q", "q_gate"), is_by_head=True)
_HF = replace(
    HF,
    names=_NAMES,
    roots=MULTIMODAL_ROOTS,
    aliases={
        "delta_z": ("linear_attn.in_proj_z",),
        "delta_b": ("linear_attn.in_proj_b",),
        "delta_a": ("linear_attn.in_proj_a",),
        "expert_down": ("mlp.experts.down_proj",),
    },
    fused=(
        _GATED_QUERIES,
        Fused("linear_attn.in_proj_qkv", ("delta_q", "delta_k", "delta_v")),
        Fused("mlp.experts.gate_up_proj", ("expert_gate", "expert_up"), is_bare=True),
    ),
    bare=("router_bias", "decay", "step_bias", "mlp.experts.down_proj"),
    norm_addend=1.0,
)
_GGUF = replace(
    GGUF,
    names={
        **GGUF.names,
        "mlp_norm": "post_attention_norm",
        "delta_z": "attn_gate",
        "delta_b": "ssm_beta",
        "delta_a": "ssm_alpha",
        "taps": "ssm_conv1d",
        "decay": "ssm_a",
        "step_bias": "ssm_dt.bias",
        "mixer_norm": "ssm_norm",
        "mixer_out": "ssm_out",
    },
    fused=(
        Fused("attn_q", ("q", "q_gate"), is_by_head=True),
        Fused("attn_qkv", ("delta_q", "delta_k", "delta_v")),
    ),
    bare=("router_bias", "decay", "step_bias"),
    decays=("decay",),
)

_MTP = PredictingForm(
    roots=("", "model.", "language_model.", "model.language_model."),
    layer="mtp.",
    inside="layers.0.",
    names={
        "mtp_join": "fc",
        "mtp_embed_norm": "pre_fc_norm_embedding",
        "mtp_state_norm": "pre_fc_norm_hidden",
        "mtp_norm": "norm",
        "mtp_embed": "embed_tokens",
        "mtp_head": "lm_head",
    },
)

QWEN35 = ArchSpec(
    name="qwen35",
    hf_names=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    gguf_names=("qwen35",),
    head_norm=HeadNorm.RMS,
    has_attention_gate=True,
    recurrence=Recurrence.DELTA_NET,
    has_tiled_gguf=True,
    head_dim_default=256,
    partial_rotary_default=0.25,
    is_tied_by_outer=True,
    safetensors=_HF,
    gguf=_GGUF,
    mtp=_MTP,
)

QWEN35_MOE = replace(
    QWEN35,
    name="qwen35moe",
    hf_names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    gguf_names=("qwen35moe",),
    experts=ExpertForm(shared_size_key="shared_expert_intermediate_size", has_shared_gate=True),
    intermediate_size_default=1,  # every layer has experts
)
"""Router: softmax over all experts, normalized over those chosen. One tensor holds the matrices of
all experts. The shared expert has a score of its own."""

QWEN3_NEXT = replace(
    QWEN35,
    name="qwen3next",
    hf_names=("Qwen3NextForCausalLM",),
    gguf_names=("qwen3next",),
    has_tiled_gguf=False,
    is_tied_by_outer=False,
    experts=ExpertForm(
        normalizes=None,
        normalizes_default=True,
        shared_size_key="shared_expert_intermediate_size",
        has_shared_gate=True,
    ),
    safetensors=replace(
        _HF,
        roots=("model.",),
        aliases={},
        fused=(
            _GATED_QUERIES,
            Fused(
                "linear_attn.in_proj_qkvz",
                ("delta_q", "delta_k", "delta_v", "delta_z"),
                is_by_head=True,
            ),
            Fused("linear_attn.in_proj_ba", ("delta_b", "delta_a"), is_by_head=True),
        ),
        bare=("router_bias", "decay", "step_bias"),
    ),
    gguf=replace(
        _GGUF,
        fused=(*_GGUF.fused, Fused("ssm_ba", ("delta_b", "delta_a"), is_by_head=True)),
    ),
)
"""Files have the rows of a key head and of its value heads next to each other."""
