"""Llama 1, 2, 3.x and models of the same architecture (SmolLM2, TinyLlama, Vicuna, Yi),
and families that differ from it in one choice."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, NormKind
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec

LLAMA = ArchSpec(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    gguf_names=("llama",),
    gguf=replace(GGUF, is_interleaved=True),
)

YI = replace(
    LLAMA,
    name="yi",
    hf_names=("YiForCausalLM",),
    gguf_names=(),  # its GGUF files use the architecture name `llama`
    safetensors=replace(HF, aliases={"attention_norm": ("ln1",), "mlp_norm": ("ln2",)}),
)
"""Yi before its checkpoints were renamed to Llama. The oldest ones name the norms differently."""

ARCEE = replace(
    LLAMA,
    name="arcee",
    hf_names=("ArceeForCausalLM",),
    gguf_names=("arcee",),
    activation=Activation.RELU2,
    has_gated_mlp=False,
    norm_eps_default=1e-5,
)
"""Arcee AFM: an MLP without a gate, and the square of ReLU."""

ORION = ArchSpec(
    name="orion",
    hf_names=("OrionForCausalLM",),
    gguf_names=("orion",),
    norm_kind=NormKind.LAYER_BIAS,
    norm_eps_default=1e-5,
)
"""Orion: LayerNorm with a bias."""

INDEX = replace(
    LLAMA, name="index", hf_names=("IndexForCausalLM",), gguf_names=(), may_normalize_head=True
)
"""Index: each row of the head is divided by its length."""
