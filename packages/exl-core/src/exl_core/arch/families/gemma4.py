"""Gemma 4, dense models (12B, 31B): five local layers per global one, each kind with its own heads.

Values have a norm without factors. In models with `attention_k_eq_v`, the values of global layers
are their projected keys. Global layers rotate a quarter of their pairs. The states after each layer
are multiplied by a number of the checkpoint. Norm weights are stored as they are.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, HeadNorm, NormPlacement
from exl_core.arch.names import GGUF_SANDWICH, HF_SANDWICH, MULTIMODAL_ROOTS
from exl_core.arch.spec import ArchSpec, EmbedScale, Window

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
        names={**HF_SANDWICH.names, "scalar": "layer_scalar"},
        roots=MULTIMODAL_ROOTS,
        bare=("scalar",),
    ),
    gguf=replace(GGUF_SANDWICH, names={**GGUF_SANDWICH.names, "scalar": "layer_output_scale"}),
)
