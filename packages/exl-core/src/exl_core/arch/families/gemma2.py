"""Gemma 2: alternating local and global layers, soft-caps, norms before and after each part."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, NormPlacement
from exl_core.arch.names import GGUF_SANDWICH, HF_SANDWICH
from exl_core.arch.spec import ArchSpec, EmbedScale, Window

GEMMA2 = ArchSpec(
    name="gemma2",
    hf_names=("Gemma2ForCausalLM",),
    gguf_names=("gemma2",),
    norm_placement=NormPlacement.SANDWICH,
    activation=Activation.GELU_TANH,
    embed_scale=EmbedScale.SQRT_HIDDEN,
    window_pattern=(Window.LOCAL, Window.GLOBAL),
    sliding_window_default=4096,
    tie_embeddings_default=True,
    head_dim_default=256,
    num_q_heads_default=8,
    num_kv_heads_default=4,
    vocab_size_default=256_000,
    attention_softcap_default=50.0,
    final_softcap_default=30.0,
    safetensors=replace(HF_SANDWICH, norm_addend=1.0),
    gguf=GGUF_SANDWICH,
)
