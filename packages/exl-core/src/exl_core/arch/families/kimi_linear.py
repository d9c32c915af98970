"""Kimi-Linear: delta nets whose states decay row by row, and latent attention without positions in
each fourth layer; experts chosen by sigmoid scores with a bias, beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import RouterBias, Scores
from exl_core.arch.names import HF
from exl_core.arch.spec import ArchSpec, ExpertForm, NoRope, Recurrence

_MOE = "block_sparse_moe."
_DELTA = {
    **{f"delta_{part}": f"{part}_proj" for part in ("q", "k", "v", "b")},
    **{"decay_a": "f_a_proj", "decay_b": "f_b_proj"},
    **{"delta_z_a": "g_a_proj", "delta_z_b": "g_b_proj"},
    **{f"{part}_taps": f"{part}_conv1d" for part in ("q", "k", "v")},
    **{"decay": "A_log", "step_bias": "dt_bias", "mixer_norm": "o_norm", "mixer_out": "o_proj"},
}

KIMI_LINEAR = ArchSpec(
    name="kimi_linear",
    hf_names=("KimiLinearForCausalLM",),
    gguf_names=(),
    has_latent=True,
    recurrence=Recurrence.KIMI_DELTA,
    no_rope=NoRope.ALWAYS,
    norm_eps_default=1e-5,
    renamed_keys=(
        ("max_position_embeddings", "model_max_length"),
        ("norm_topk_prob", "moe_renormalize"),
        ("n_group", "num_expert_group"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("linear_num_heads", "linear_attn_config.num_heads"),
        ("linear_head_dim", "linear_attn_config.head_dim"),
        ("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size"),
    ),
    required=(
        ("moe_layer_freq", (1, None)),
        ("moe_router_activation_func", ("sigmoid", None)),
        ("mla_use_nope", (True, None)),
    ),
    experts=ExpertForm(
        num_experts_keys=("num_experts", "num_local_experts"),
        scores=Scores.SIGMOID,
        bias=RouterBias.CHOICE,
        normalizes=None,
        normalizes_default=True,
        eps=1e-20,
        factor_default=2.446,
        has_groups=True,
        shared_count_key="n_shared_experts",
        shared_count_default=1,
        first_sparse_default=1,
    ),
    safetensors=replace(
        HF,
        names={
            **HF.names,
            **{role: f"self_attn.{name}" for role, name in _DELTA.items()},
            **{"router": f"{_MOE}gate", "router_bias": f"{_MOE}gate.e_score_correction_bias"},
            **{f"shared_{part}": f"{_MOE}shared_experts.{part}_proj" for part in ("gate", "up")},
            "shared_down": f"{_MOE}shared_experts.down_proj",
            "expert_gate": f"{_MOE}experts.{{}}.w1",
            "expert_up": f"{_MOE}experts.{{}}.w3",
            "expert_down": f"{_MOE}experts.{{}}.w2",
        },
        aliases={part: (f"{_MOE}{part}_proj",) for part in ("gate", "up", "down")},
        fused=(),
        bare=("router_bias", "decay", "step_bias"),
    ),
)
