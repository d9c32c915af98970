"""LFM2, dense and with experts: short convolutions, and some layers of attention."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm, RouterBias, Scores
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, ExpertForm, Recurrence

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

LFM2_MOE = replace(
    LFM2,
    name="lfm2moe",
    hf_names=("Lfm2MoeForCausalLM",),
    gguf_names=("lfm2moe",),
    renamed_keys=(*LFM2.renamed_keys, ("first_k_dense_replace", "num_dense_layers")),
    required=(("use_expert_bias", (None, True)),),
    has_rounded_intermediate_size=False,
    experts=ExpertForm(
        num_experts_keys=("num_experts",),
        scores=Scores.SIGMOID,
        bias=RouterBias.CHOICE,
        normalizes=None,
        normalizes_default=True,
        eps=1e-6,
        factor_default=1.0,
        first_sparse_default=2,
    ),
    safetensors=replace(
        LFM2.safetensors,
        names={
            **LFM2.safetensors.names,
            "router": "feed_forward.gate",
            "router_bias": "feed_forward.expert_bias",
            "expert_gate": "feed_forward.experts.{}.w1",
            "expert_up": "feed_forward.experts.{}.w3",
            "expert_down": "feed_forward.experts.{}.w2",
        },
    ),
)
"""Router: sigmoid scores, and numbers added to them for the choice. The first layers are dense."""
