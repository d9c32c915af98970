"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention, an MLP or experts.

Attention has no positions. MLPs and experts have no gate, and the square of ReLU. Experts are
chosen by sigmoid scores with a bias; in the larger models they read and write narrower states than
the layers. Layers for multi-token prediction are not read.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, RouterBias, Scores
from exl_core.arch.names import GGUF, HF, MAMBA2_GGUF_NAMES
from exl_core.arch.spec import ArchSpec, ExpertForm, NoRope, Recurrence

_BARE = ("router_bias", "decay", "step_bias", "skip")
_MIXER = {
    **{"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj"},
    **{"up": "up_proj", "down": "down_proj", "router": "gate"},
    **{"router_bias": "gate.e_score_correction_bias"},
    **{"expert_up": "experts.{}.up_proj", "expert_down": "experts.{}.down_proj"},
    **{"shared_up": "shared_experts.up_proj", "shared_down": "shared_experts.down_proj"},
    **{"latent_down": "fc1_latent_proj", "latent_up": "fc2_latent_proj"},
    **{"mixer_in": "in_proj", "taps": "conv1d", "decay": "A_log", "step_bias": "dt_bias"},
    **{"skip": "D", "mixer_norm": "norm", "mixer_out": "out_proj"},
}

NEMOTRON_H = ArchSpec(
    name="nemotron_h",
    hf_names=("NemotronHForCausalLM",),
    gguf_names=("nemotron_h", "nemotron_h_moe"),
    activation=Activation.RELU2,
    has_gated_mlp=False,
    has_single_parts=True,
    recurrence=Recurrence.MAMBA2,
    least_step_key="time_step_min",
    no_rope=NoRope.ALWAYS,
    norm_eps_keys=("layer_norm_epsilon", "norm_eps"),
    norm_eps_default=1e-5,
    renamed_keys=(
        ("hidden_act", "mlp_hidden_act"),
        ("mamba_n_heads", "mamba_num_heads"),
        ("mamba_d_head", "mamba_head_dim"),
        ("mamba_d_state", "ssm_state_size"),
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_proj_bias", "use_bias"),
        ("mamba_conv_bias", "use_conv_bias"),
    ),
    required=(
        ("mlp_bias", (False, None)),
        ("attention_bias", (False, None)),
        ("mamba_hidden_act", ("silu", None)),
        ("sliding_window", (None,)),
    ),
    experts=ExpertForm(
        num_experts_keys=("n_routed_experts",),
        scores=Scores.SIGMOID,
        bias=RouterBias.CHOICE,
        normalizes=None,
        normalizes_default=True,
        eps=1e-20,
        factor_default=1.0,
        has_groups=True,
        shared_size_key="moe_shared_expert_intermediate_size",
        latent_size_key="moe_latent_size",
        is_optional=True,
    ),
    safetensors=replace(
        HF,
        names={
            **HF.names,
            **{role: f"mixer.{name}" for role, name in _MIXER.items()},
            **{"embed": "embeddings", "final_norm": "norm_f"},
            **{"attention_norm": "norm", "mlp_norm": "norm"},
        },
        roots=("backbone.", "model."),
        fused=(),
        bare=_BARE,
    ),
    gguf=replace(
        GGUF,
        names={
            **GGUF.names,
            **MAMBA2_GGUF_NAMES,
            **{"mlp_norm": "attn_norm"},
            **{"latent_down": "ffn_latent_down", "latent_up": "ffn_latent_up"},
        },
        bare=_BARE,
        decays=("decay",),
    ),
)
