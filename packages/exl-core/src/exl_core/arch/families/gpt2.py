"""GPT-2 and GPTBigCode (StarCoder, SantaCoder): LayerNorm and biases everywhere, no RoPE.

A vector of each position is added to the embedding, so the context has a fixed end. GPT-2 stores
its matrices transposed. GPTBigCode has one key head.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, NormKind
from exl_core.arch.names import GGUF, FileForm, Fused
from exl_core.arch.spec import ArchSpec, NoRope

_NAMES = {
    "embed": "wte",
    "positions": "wpe",
    "final_norm": "ln_f",
    "head": "lm_head",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "output": "attn.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_ALIASES = {  # names in EXL2 files
    "embed": ("embed_tokens",),
    "final_norm": ("norm",),
    **{role: (f"self_attn.{role}_proj",) for role in ("q", "k", "v")},
    "output": ("self_attn.o_proj",),
}
_FORM = FileForm(
    _NAMES,
    roots=("transformer.", "", "model."),
    layer="h.{}.",
    other_layers=("layers.{}.",),
    aliases=_ALIASES,
    fused=(Fused("attn.c_attn", ("q", "k", "v")),),
)

GPT2 = ArchSpec(
    name="gpt2",
    hf_names=("GPT2LMHeadModel",),
    gguf_names=("gpt2",),
    norm_kind=NormKind.LAYER_BIAS,
    activation=Activation.GELU_TANH,
    has_gated_mlp=False,
    has_bias_default=True,
    no_rope=NoRope.ALL,
    renamed_keys=(
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
        ("intermediate_size", "n_inner"),
        ("hidden_act", "activation_function"),
    ),
    required=(
        ("scale_attn_weights", (None, True)),
        ("scale_attn_by_inverse_layer_idx", (None, False)),
        ("add_cross_attention", (None, False)),
        ("multi_query", (None, True)),
    ),
    norm_eps_keys=("layer_norm_epsilon",),
    norm_eps_default=1e-5,
    intermediate_ratio=4,
    tie_embeddings_default=True,
    safetensors=replace(_FORM, transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    gguf=replace(
        GGUF,
        names={**GGUF.names, "positions": "position_embd"},
        fused=(Fused("attn_qkv", ("q", "k", "v")),),
    ),
)

GPT_BIGCODE = replace(
    GPT2,
    name="gptbigcode",
    hf_names=("GPTBigCodeForCausalLM",),
    gguf_names=("starcoder",),
    num_kv_heads_default=1,
    safetensors=_FORM,
)
