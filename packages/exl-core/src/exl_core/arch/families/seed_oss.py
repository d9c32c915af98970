"""Seed-OSS: Llama's architecture with biases on q, k, v and an explicit head size.

GGUF files name the norm before the MLP `post_attention_norm`.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.names import GGUF
from exl_core.arch.spec import ArchSpec

SEED_OSS = ArchSpec(
    name="seed-oss",
    hf_names=("SeedOssForCausalLM",),
    gguf_names=("seed_oss",),
    has_qkv_bias=True,
    head_dim_default=128,
    gguf=replace(GGUF, names={**GGUF.names, "mlp_norm": "post_attention_norm"}),
)
