"""Gemma 4 (12B, 26B-A4B, 31B): five local layers per global one, each kind with its own heads.

Values have a norm without factors. In models with `attention_k_eq_v`, the values of global layers
are their projected keys. Global layers rotate a quarter of their pairs. The states after each layer
are multiplied by a number of the checkpoint. Norm weights are stored as they are. Layers with
experts have an MLP beside them.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, HeadNorm, NormPlacement
from exl_core.arch.names import GGUF_SANDWICH, HF_SANDWICH, MULTIMODAL_ROOTS, Fused
from exl_core.arch.spec import ArchSpec, EmbedScale, ExpertForm, Window

_NAMES = {
    "scalar": "layer_scalar",
    "router": "router.proj",
    "router_norm": "router.scale",
    "expert_factors": "router.per_expert_scale",
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_post_norm": "post_feedforward_layernorm_2",
    "shared_post_norm": "post_feedforward_layernorm_1",
    "expert_gate": "experts.{}.gate_proj",
    "expert_up": "experts.{}.up_proj",
    "expert_down": "experts.{}.down_proj",
    **{f"shared_{role}": f"mlp.{role}_proj" for role in ("gate", "up", "down")},
}
_GGUF_NAMES = {
    "scalar": "layer_output_scale",
    "router_norm": "ffn_gate_inp.scale",
    "expert_factors": "ffn_down_exps.scale",
    "expert_norm": "pre_ffw_norm_2",
    "expert_post_norm": "post_ffw_norm_2",
    "shared_post_norm": "post_ffw_norm_1",
    **{f"shared_{role}": f"ffn_{role}" for role in ("gate", "up", "down")},
}

GEMMA4 = ArchSpec(
    name="gemma4",
    hf_names=(
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    ),
    gguf_names=("gemma4",),
    norm_placement=NormPlacement.SANDWICH,
    activation=Activation.GELU_TANH,
    experts=ExpertForm(
        num_experts_keys=("num_experts",),
        top_k_key="top_k_experts",
        flag_key="enable_moe_block",
        is_beside_dense=True,
        has_router_norm=True,
        has_expert_factors=True,
    ),
    head_norm=HeadNorm.RMS,
    has_value_norm=True,
    has_layer_scalar=True,
    attention_scale=1.0,
    embed_scale=EmbedScale.SQRT_HIDDEN,
    window_pattern=(*(Window.LOCAL,) * 5, Window.GLOBAL),
    sliding_window_default=512,
    tie_embeddings_default=True,
    head_dim_default=256,
    global_head_dim_default=512,
    num_q_heads_default=8,
    num_kv_heads_default=4,
    vocab_size_default=262_144,
    rope_base_default=1_000_000.0,
    local_rope_base_default=10_000.0,
    safetensors=replace(
        HF_SANDWICH,
        names={**HF_SANDWICH.names, **_NAMES},
        aliases={"expert_down": ("experts.down_proj",)},
        fused=(
            *HF_SANDWICH.fused,
            Fused("experts.gate_up_proj", ("expert_gate", "expert_up"), is_bare=True),
        ),
        roots=MULTIMODAL_ROOTS,
        bare=("scalar", "router_norm", "expert_factors", "experts.down_proj"),
    ),
    gguf=replace(
        GGUF_SANDWICH,
        names={**GGUF_SANDWICH.names, **_GGUF_NAMES},
        fused=(Fused("ffn_gate_up_exps", ("expert_gate", "expert_up")),),
        bare=("router_norm", "expert_factors"),
    ),
)
