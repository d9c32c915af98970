"""GLM-4 (dense): four norms per layer, and RoPE in interleaved pairs on half of each head.

The norm before the MLP is called `post_attention_layernorm`. GGUF files store gate and up as
`ffn_up`.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import LayerSpec, NormPlacement
from exl_core.arch.names import GGUF_SANDWICH, HF, Fused
from exl_core.arch.spec import ArchSpec, LayerNumbers, decoder_layer

_OWN_NORMS = {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def _layer(arch: ArchSpec, numbers: LayerNumbers) -> LayerSpec:
    """Biases are those of q, k and v alone."""
    return decoder_layer(arch, replace(numbers, has_output_bias=False, has_mlp_bias=False))


GLM4 = ArchSpec(
    name="glm4",
    hf_names=("Glm4ForCausalLM",),
    gguf_names=("glm4",),
    norm_placement=NormPlacement.SANDWICH,
    has_bias_default=True,
    partial_rotary_default=0.5,
    norm_eps_default=1.5625e-7,
    head_dim_default=128,
    num_kv_heads_default=2,
    safetensors=replace(HF, names={**HF.names, **_OWN_NORMS}, is_interleaved=True),
    make_layer=_layer,
    gguf=replace(GGUF_SANDWICH, fused=(Fused("ffn_up", ("gate", "up")),), is_interleaved=True),
)
