"""InternLM 2 and 2.5: Llama's architecture under other names, q, k, v fused by groups of heads.

EXL2 files have separate q, k, v and the usual names of the embedding and the head.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF, HF, Fused
from exl_core.arch.spec import ArchSpec

INTERNLM2 = ArchSpec(
    name="internlm2",
    hf_names=("InternLM2ForCausalLM",),
    gguf_names=("internlm2",),
    bias_key="bias",
    norm_eps_default=1e-6,
    safetensors=replace(
        HF,
        names={
            **HF.names,
            "gate": "feed_forward.w1",
            "up": "feed_forward.w3",
            "down": "feed_forward.w2",
            "attention_norm": "attention_norm",
            "mlp_norm": "ffn_norm",
        },
        aliases={
            "embed": ("tok_embeddings",),
            "head": ("output",),
            "output": ("attention.wo",),
        },
        fused=(Fused("attention.wqkv", ("q", "k", "v"), is_grouped=True),),
    ),
    gguf=replace(GGUF, is_interleaved=True),
)
