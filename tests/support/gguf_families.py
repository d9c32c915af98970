"""Tiny models of the families that GGUF files can hold."""

from __future__ import annotations

from typing import Any

from support.tiny_models import (
    tiny_apertus,
    tiny_arcee,
    tiny_bigcode,
    tiny_cohere,
    tiny_cohere2,
    tiny_dbrx,
    tiny_ernie,
    tiny_ernie_moe,
    tiny_exaone4,
    tiny_gemma,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gemma4,
    tiny_gemma4_moe,
    tiny_glm4,
    tiny_glm4_moe,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_granite,
    tiny_granite4,
    tiny_granite_moe,
    tiny_hunyuan,
    tiny_hunyuan_moe,
    tiny_llama,
    tiny_llama4,
    tiny_minimax_m2,
    tiny_ministral3,
    tiny_mistral,
    tiny_mixtral,
    tiny_olmo2,
    tiny_olmo3,
    tiny_orion,
    tiny_phi3,
    tiny_phi3_longrope,
    tiny_qwen2,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_seed_oss,
    tiny_smollm3,
    tiny_starcoder2,
)

THETA = {"rope_theta": 10000.0}
GEMMA_PATTERN = ["sliding_attention"] * 5 + ["full_attention"]


GGUF_FAMILIES: dict[str, tuple[str | None, Any]] = {
    "llama": (None, tiny_llama),
    "llama-tied-bias": (
        None,
        lambda: tiny_llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "mistral": (None, lambda: tiny_mistral(sliding_window=None)),
    "mistral3": ("mistral3", lambda: tiny_mistral(sliding_window=None)),
    "internlm2": ("internlm2", tiny_llama),
    "qwen2": (None, tiny_qwen2),
    "qwen2vl": ("qwen2vl", tiny_qwen2),
    "qwen3": (None, lambda: tiny_qwen3(tie_word_embeddings=True)),
    "qwen3vl": ("qwen3vl", tiny_qwen3),
    "seed-oss": (None, tiny_seed_oss),
    "phi3-window": (None, lambda: tiny_phi3(sliding_window=50)),
    "phi3-longrope": (None, tiny_phi3_longrope),
    "glm4": (None, tiny_glm4),
    "glm4-no-bias": (None, lambda: tiny_glm4(attention_bias=False)),
    "ernie4.5": (None, tiny_ernie),
    "smollm3": (None, tiny_smollm3),
    "olmo2": (None, tiny_olmo2),
    "olmo3": (None, tiny_olmo3),
    "exaone4": (None, tiny_exaone4),
    "exaone4-global": (
        None,
        lambda: tiny_exaone4(sliding_window=None, layer_types=["full_attention"] * 4),
    ),
    "ministral3": (None, tiny_ministral3),
    "granite": (None, tiny_granite),
    "minicpm": ("minicpm", lambda: tiny_granite(tie_word_embeddings=True)),
    "hunyuan": ("hunyuan-dense", tiny_hunyuan),
    "command-r": ("command-r", tiny_cohere),
    "command-r-head-norm": ("command-r", lambda: tiny_cohere(use_qk_norm=True)),
    "cohere2": (None, tiny_cohere2),
    "starcoder2": (None, tiny_starcoder2),
    "arcee": (None, tiny_arcee),
    "orion": ("orion", tiny_orion),
    "qwen3moe": (None, tiny_qwen3_moe),
    "qwen3vlmoe": ("qwen3vlmoe", tiny_qwen3_moe),
    "mixtral": (None, tiny_mixtral),
    "qwen2moe": (None, tiny_qwen2_moe),
    "glm4moe": (None, tiny_glm4_moe),
    "ernie4_5-moe": (None, tiny_ernie_moe),
    "hunyuan-moe": (None, tiny_hunyuan_moe),
    "minimax-m2": (None, tiny_minimax_m2),
    "granitemoe": (None, tiny_granite_moe),
    "gpt-oss": (None, tiny_gpt_oss),
    # Its default scaling of RoPE would need a tensor of divisors.
    "apertus": (None, lambda: tiny_apertus(rope_parameters={"rope_type": "default", **THETA})),
    "granite4": (None, tiny_granite4),
    "gemma4": (None, tiny_gemma4),
    "gemma4-moe": (None, tiny_gemma4_moe),
    "gemma4-values": (None, lambda: tiny_gemma4(attention_k_eq_v=False)),
    "dbrx": (None, tiny_dbrx),
    "gpt2": (None, tiny_gpt2),
    "starcoder": ("starcoder", tiny_bigcode),
    # The format has no keys for the temperature and the chunk.
    "llama4": (
        None,
        lambda: tiny_llama4(floor_scale=8192, attn_scale=0.1, attention_chunk_size=8192),
    ),
    "gemma": (None, tiny_gemma),
    "gemma2": (None, lambda: tiny_gemma2(query_pre_attn_scalar=20)),
    "gemma3": (
        None,
        lambda: tiny_gemma3(
            num_hidden_layers=6, layer_types=GEMMA_PATTERN, query_pre_attn_scalar=20
        ),
    ),
}
"""Name of the architecture in the file, if it is not that of the model's class, and a builder."""
EXPERTS = (
    *("qwen3moe", "mixtral", "qwen2moe", "glm4moe"),
    *("ernie4_5-moe", "hunyuan-moe", "minimax-m2", "granitemoe", "gemma4-moe"),
    *("qwen3vlmoe", "dbrx", "llama4", "gpt-oss"),
)
"""Families with experts, which `exl convert` refuses."""
