"""Gemma 3 (the language model): five local layers per global one, norms before and after each
part."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, HeadNorm, NormPlacement
from exl_core.arch.names import GGUF_SANDWICH, HF_SANDWICH, MULTIMODAL_ROOTS
from exl_core.arch.spec import ArchSpec, EmbedScale, Window

GEMMA3 = ArchSpec(
    name="gemma3",
    hf_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_names=("gemma3",),
    norm_placement=NormPlacement.SANDWICH,
    activation=Activation.GELU_TANH,
    head_norm=HeadNorm.RMS,
    embed_scale=EmbedScale.SQRT_HIDDEN,
    window_pattern=(*(Window.LOCAL,) * 5, Window.GLOBAL),
    tie_embeddings_default=True,
    head_dim_default=256,  # published configurations omit values equal to these defaults
    num_q_heads_default=8,
    num_kv_heads_default=4,
    vocab_size_default=262_208,
    rope_base_default=1_000_000.0,
    local_rope_base_default=10_000.0,
    safetensors=replace(HF_SANDWICH, norm_addend=1.0, roots=MULTIMODAL_ROOTS),
    gguf=GGUF_SANDWICH,
)
