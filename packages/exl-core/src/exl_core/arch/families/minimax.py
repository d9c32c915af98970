"""MiniMax M2: experts chosen by sigmoid scores with a bias, and norms of queries and keys over all
heads. Half of each head is rotated (`rotary_dim`)."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm, RouterBias, Scores
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, ExpertForm

MINIMAX_M2 = ArchSpec(
    name="minimax-m2",
    hf_names=("MiniMaxM2ForCausalLM",),
    gguf_names=("minimax-m2",),
    head_norm=HeadNorm.RMS_WHOLE,
    head_dim_default=128,
    rope_base_default=5_000_000.0,
    experts=ExpertForm(
        num_experts_keys=("num_local_experts", "num_experts"),
        size_key="intermediate_size",
        scores=Scores.SIGMOID,
        bias=RouterBias.CHOICE,
    ),
    safetensors=replace(
        HF,
        names={
            **HF.names,
            "router": "block_sparse_moe.gate",
            "router_bias": "block_sparse_moe.e_score_correction_bias",
            "expert_gate": "block_sparse_moe.experts.{}.w1",
            "expert_up": "block_sparse_moe.experts.{}.w3",
            "expert_down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    gguf=GGUF,
)
