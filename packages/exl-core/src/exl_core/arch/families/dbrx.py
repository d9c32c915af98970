"""DBRX: LayerNorm without a bias, fused and clipped q, k and v, 4 of 16 experts in every layer.

Checkpoints stack the matrices of all experts, those of `down` transposed. EXL2 files have a tensor
per expert, and Llama's names, which are the canonical ones here.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import NormKind
from exl_core.arch.names import GGUF, FileForm, Fused
from exl_core.arch.spec import ArchSpec, ExpertForm

_PARTS = ("w1", "v1", "w2")
_EXPERTS = ("expert_gate", "expert_up", "expert_down")
_STACKED = {role: f"ffn.experts.mlp.{name}" for role, name in zip(_EXPERTS, _PARTS, strict=True)}
_NAMES = {
    "embed": "embed_tokens",
    "final_norm": "norm",
    "head": "lm_head",
    **{role: f"self_attn.{role}_proj" for role in ("q", "k", "v")},
    "output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "router": "block_sparse_moe.gate",
    **{
        role: f"block_sparse_moe.experts.{{}}.{name}"
        for role, name in zip(_EXPERTS, _PARTS, strict=True)
    },
}
_ALIASES = {
    "embed": ("wte",),
    "final_norm": ("norm_f",),
    **{role: (f"norm_attn_norm.attn.{role}_proj",) for role in ("q", "k", "v")},
    "output": ("norm_attn_norm.attn.out_proj",),
    "attention_norm": ("norm_attn_norm.norm_1",),
    "mlp_norm": ("norm_attn_norm.norm_2",),
    "router": ("ffn.router.layer",),
    **{
        # Stacked, or with the names of the copy of the model that GPTQ tools take.
        role: (_STACKED[role], f"ffn.experts.mlp.{{}}.{name}")
        for role, name in zip(_EXPERTS, _PARTS, strict=True)
    },
}

DBRX = ArchSpec(
    name="dbrx",
    hf_names=("DbrxForCausalLM",),
    gguf_names=("dbrx",),
    norm_kind=NormKind.LAYER,
    norm_eps_keys=(),
    norm_eps_default=1e-5,
    has_qkv_clip=True,
    renamed_keys=(
        ("hidden_size", "d_model"),
        ("num_attention_heads", "n_heads"),
        ("num_hidden_layers", "n_layers"),
        ("max_position_embeddings", "max_seq_len"),
        ("num_key_value_heads", "attn_config.kv_n_heads"),
        ("rope_theta", "attn_config.rope_theta"),
        ("clip_qkv", "attn_config.clip_qkv"),
        ("intermediate_size", "ffn_config.ffn_hidden_size"),
        ("hidden_act", "ffn_config.ffn_act_fn.name"),
        ("moe_num_experts", "ffn_config.moe_num_experts"),
        ("moe_top_k", "ffn_config.moe_top_k"),
        ("moe_normalize_expert_weights", "ffn_config.moe_normalize_expert_weights"),
    ),
    experts=ExpertForm(
        num_experts_keys=("moe_num_experts",),
        top_k_key="moe_top_k",
        size_key="intermediate_size",
        norm_power_key="moe_normalize_expert_weights",
    ),
    safetensors=FileForm(
        _NAMES,
        roots=("model.", "transformer."),
        layer="layers.{}.",
        other_layers=("blocks.{}.",),
        aliases=_ALIASES,
        fused=(Fused("norm_attn_norm.attn.Wqkv", ("q", "k", "v")),),
        bare=tuple(_STACKED.values()),
        transposed=(_STACKED["expert_down"],),
    ),
    gguf=replace(
        GGUF,
        names={**GGUF.names, "mlp_norm": "attn_output_norm"},
        fused=(Fused("attn_qkv", ("q", "k", "v")),),
    ),
)
"""Router: softmax over all experts, normalized over those chosen."""
