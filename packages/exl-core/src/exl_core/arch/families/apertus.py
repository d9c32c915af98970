"""Apertus: Llama's architecture with norms of the heads, and an MLP without a gate whose activation
has two learned numbers in each layer.

GGUF files have these numbers in their metadata.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, HeadNorm
from exl_core.arch.names import HF
from exl_core.arch.spec import ArchSpec

APERTUS = ArchSpec(
    name="apertus",
    hf_names=("ApertusForCausalLM",),
    gguf_names=("apertus",),
    activation=Activation.XIELU,
    has_gated_mlp=False,
    head_norm=HeadNorm.RMS,
    rope_base_default=12_000_000.0,
    norm_eps_default=1e-5,
    safetensors=replace(
        HF,
        names={
            **HF.names,
            "attention_norm": "attention_layernorm",
            "mlp_norm": "feedforward_layernorm",
            "alpha_p": "mlp.act_fn.alpha_p",
            "alpha_n": "mlp.act_fn.alpha_n",
        },
        bare=("alpha_p", "alpha_n"),
    ),
)
