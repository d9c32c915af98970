"""Hunyuan, dense and A13B: Llama's architecture with a norm of each query and key head after RoPE.

The RoPE base of checkpoints is raised by their `alpha`; GGUF files store the raised base.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, ExpertForm

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

_OWN_NAMES = {
    "router": "mlp.gate.wg",
    "shared_gate": "mlp.shared_mlp.gate_proj",
    "shared_up": "mlp.shared_mlp.up_proj",
    "shared_down": "mlp.shared_mlp.down_proj",
}

HUNYUAN_MOE = replace(
    HUNYUAN,
    name="hunyuan-moe",
    hf_names=("HunYuanMoEV1ForCausalLM",),
    gguf_names=("hunyuan-moe",),
    experts=ExpertForm(
        top_k_key="moe_topk", size_key="intermediate_size", shared_size_key="intermediate_size"
    ),
    safetensors=replace(HUNYUAN.safetensors, names={**HUNYUAN.safetensors.names, **_OWN_NAMES}),
)
"""Experts and the shared expert have the same width. Router: softmax over all experts, normalized
over those chosen."""
