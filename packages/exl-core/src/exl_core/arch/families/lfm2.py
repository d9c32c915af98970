"""LFM2: most layers are short convolutions, the others attention with head norms."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, Recurrence

LFM2 = ArchSpec(
    name="lfm2",
    hf_names=("Lfm2ForCausalLM",),
    gguf_names=("lfm2",),
    head_norm=HeadNorm.RMS,
    recurrence=Recurrence.SHORT_CONV,
    renamed_keys=(("intermediate_size", "block_ff_dim"), ("tie_word_embeddings", "tie_embedding")),
    has_rounded_intermediate_size=True,
    norm_eps_keys=("norm_eps",),
    norm_eps_default=1e-5,
    rope_base_default=1_000_000.0,
    tie_embeddings_default=True,
    safetensors=replace(
        HF,
        names={
            **HF.names,
            "final_norm": "embedding_norm",
            "attention_norm": "operator_norm",
            "mlp_norm": "ffn_norm",
            "output": "self_attn.out_proj",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
            "mixer_in": "conv.in_proj",
            "taps": "conv.conv",
            "mixer_out": "conv.out_proj",
            "gate": "feed_forward.w1",
            "up": "feed_forward.w3",
            "down": "feed_forward.w2",
        },
    ),
    gguf=replace(
        GGUF,
        names={
            **GGUF.names,
            "final_norm": "token_embd_norm",
            "mixer_in": "shortconv.in_proj",
            "taps": "shortconv.conv",
            "mixer_out": "shortconv.out_proj",
        },
    ),
)
