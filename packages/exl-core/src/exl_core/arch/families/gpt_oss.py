"""gpt-oss: experts with biases and a clamped activation, chosen by logits with a bias. Attention
has sinks, and a window in every other layer.

A checkpoint stores the matrices of all experts of a layer in one tensor, as floats or as MXFP4. The
rows of gate and up take turns in it.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, RouterBias
from exl_core.arch.names import GGUF, HF, Fused
from exl_core.arch.spec import ArchSpec, ExpertForm, Window

GPT_OSS = ArchSpec(
    name="gpt-oss",
    hf_names=("GptOssForCausalLM",),
    gguf_names=("gpt-oss",),
    activation=Activation.CLAMPED_SWIGLU,
    activation_aliases=("silu",),
    has_sinks=True,
    window_pattern=(Window.LOCAL, Window.GLOBAL),
    sliding_window_default=128,
    bias_key="attention_bias",
    has_bias_default=True,
    head_dim_default=64,
    rope_base_default=150_000.0,
    has_rounded_yarn=False,
    norm_eps_default=1e-5,
    required=(("swiglu_limit", (None, 7.0)), ("swiglu_alpha", (None, 1.702))),
    experts=ExpertForm(
        num_experts_keys=("num_local_experts", "num_experts"),
        size_key="intermediate_size",
        bias=RouterBias.LOGITS,
        has_bias=True,
    ),
    safetensors=replace(
        HF,
        names={**HF.names, "router": "mlp.router", "sinks": "self_attn.sinks"},
        aliases={"expert_down": ("mlp.experts.down_proj",)},
        fused=(
            *HF.fused,
            Fused(
                "mlp.experts.gate_up_proj",
                ("expert_gate", "expert_up"),
                is_bare=True,
                is_interleaved=True,
            ),
        ),
        bare=(*HF.bare, "sinks", "mlp.experts.down_proj"),
        transposed=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    gguf=replace(
        GGUF, names={**GGUF.names, "mlp_norm": "post_attention_norm", "sinks": "attn_sinks"}
    ),
)
"""Router: softmax over the logits of the chosen experts, which is the softmax over all, normalized
over those chosen."""
