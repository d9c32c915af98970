"""Hunyuan (dense): Llama's architecture with a norm of each query and key head after RoPE.

The RoPE base of checkpoints is raised by their `alpha`; GGUF files store the raised base.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec

HUNYUAN = ArchSpec(
    name="hunyuan-dense",
    hf_names=("HunYuanDenseV1ForCausalLM",),
    gguf_names=("hunyuan-dense",),
    head_norm=HeadNorm.RMS_AFTER_ROPE,
    norm_eps_default=1e-5,
    safetensors=replace(
        HF,
        names={
            **HF.names,
            "q_norm": "self_attn.query_layernorm",
            "k_norm": "self_attn.key_layernorm",
        },
    ),
    gguf=GGUF,
)
