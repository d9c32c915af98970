"""Cohere's Command-R, Command-R+, Aya (Cohere) and Command-A, Command R7B (Cohere2).

LayerNorm without a bias, attention and MLP in parallel, interleaved RoPE pairs in checkpoints and
in GGUF files, a factor on the logits. Cohere2 has a window and RoPE in three of four layers, and
neither in the others.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm, NormKind, NormPlacement
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, NoRope, Window

COHERE = ArchSpec(
    name="cohere",
    hf_names=("CohereForCausalLM",),
    gguf_names=("command-r",),
    norm_placement=NormPlacement.PARALLEL,
    norm_kind=NormKind.LAYER,
    optional_head_norm=HeadNorm.LAYER,
    logit_scale_default=0.0625,
    norm_eps_keys=("layer_norm_eps",),
    norm_eps_default=1e-5,
    context_key="model_max_length",
    tie_embeddings_default=True,
    safetensors=replace(HF, is_interleaved=True),
    gguf=replace(GGUF, is_interleaved=True),
)

COHERE2 = replace(
    COHERE,
    name="cohere2",
    hf_names=("Cohere2ForCausalLM",),
    gguf_names=("cohere2",),
    optional_head_norm=None,
    window_pattern=(*(Window.LOCAL,) * 3, Window.GLOBAL),
    sliding_window_default=4096,
    no_rope=NoRope.GLOBAL,
)
