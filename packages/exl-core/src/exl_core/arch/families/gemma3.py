"""Gemma 3 (the language model): five local layers per global one, norms before and after each
part."""

from __future__ import annotations

from exl_core.arch.layers import Activation, HeadNorm, NormPlacement
from exl_core.arch.spec import ArchSpec, EmbedScale, Norm, Window

GEMMA3 = ArchSpec(
    name="gemma3",
    hf_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_names=("gemma3",),
    norm=Norm.RMS_PLUS_ONE,
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
    is_gguf_norm_folded=True,
    key_roots=("model.", "language_model.model.", "model.language_model."),
)
