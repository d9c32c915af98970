"""Gemma 1 and CodeGemma: a gated MLP with tanh-GELU, scaled embeddings, norms stored minus one.

GemMoE has the experts and the router of Mixtral instead of the MLP.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.families.mistral import MIXTRAL_NAMES
from exl_core.arch.layers import Activation
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, EmbedScale, ExpertForm

GEMMA = ArchSpec(
    name="gemma",
    hf_names=("GemmaForCausalLM",),
    gguf_names=("gemma",),
    activation=Activation.GELU_TANH,
    activation_aliases=("gelu",),  # the first files say so; the model always used tanh-GELU
    embed_scale=EmbedScale.SQRT_HIDDEN,
    tie_embeddings_default=True,
    head_dim_default=256,
    num_q_heads_default=16,
    num_kv_heads_default=16,
    vocab_size_default=256_000,
    safetensors=replace(HF, norm_addend=1.0),
    gguf=GGUF,
)

GEMMOE = replace(
    GEMMA,
    name="gemmoe",
    hf_names=("GemmoeForCausalLM",),
    gguf_names=(),
    experts=ExpertForm(size_key="intermediate_size", top_k_default=2),
    safetensors=replace(GEMMA.safetensors, names={**HF.names, **MIXTRAL_NAMES}),
)
