"""One tiny model of every family, with sizes that all formats can store.

Widths are multiples of 32, and hidden states that the families' windows and original contexts do
not cover. Sizes of the models in `tiny_models` are more awkward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import tiny_hybrids as hybrids
from support import tiny_latent as latent
from support import tiny_models as tiny
from support.renamed_models import (
    as_index,
    as_internlm2,
    as_minicpm,
    as_oldest_gpt2,
    as_orion,
    as_renamed_dbrx,
    as_transposed_experts,
    as_yi,
)
from support.tiny_gemmoe import tiny_gemmoe

_WIDTHS: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160}
_OWN_HEADS: dict[str, Any] = {**_WIDTHS, "head_dim": 32}


def _wide(build: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """Heads of 16, which share the hidden size."""
    return lambda **more: build(**{**_WIDTHS, **changes, **more})


def _own_heads(build: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """Heads of 32, together wider than the hidden size."""
    return lambda **more: build(**{**_OWN_HEADS, **changes, **more})


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _own_heads(tiny.tiny_llama),
    "yi": _own_heads(tiny.tiny_llama),
    "mistral": _own_heads(tiny.tiny_mistral, sliding_window=50),
    "pixtral": _own_heads(tiny.tiny_pixtral),
    "qwen2": _wide(tiny.tiny_qwen2),
    "qwen2.5-vl": _wide(tiny.tiny_qwen2_5_vl),
    "qwen3": _own_heads(tiny.tiny_qwen3),
    "qwen3-vl": _own_heads(tiny.tiny_qwen3_vl),
    "phi3": _wide(tiny.tiny_phi3),
    "phi3-longrope": _wide(tiny.tiny_phi3_longrope),
    "gemma": _own_heads(tiny.tiny_gemma),
    "gemma2": _own_heads(tiny.tiny_gemma2),
    "gemma3": _own_heads(tiny.tiny_gemma3),
    "gemma4": _wide(tiny.tiny_gemma4),
    "gemma4-values": _wide(tiny.tiny_gemma4, attention_k_eq_v=False),
    "seed-oss": _own_heads(tiny.tiny_seed_oss),
    "glm4": _own_heads(tiny.tiny_glm4),
    "ernie4.5": _own_heads(tiny.tiny_ernie),
    "internlm2": _own_heads(tiny.tiny_llama),
    "ministral3": _own_heads(tiny.tiny_ministral3),
    "smollm3": _wide(tiny.tiny_smollm3),
    "olmo2": _wide(tiny.tiny_olmo2),
    "olmo3": _wide(tiny.tiny_olmo3),
    "exaone4": _own_heads(tiny.tiny_exaone4),
    "granite": _wide(tiny.tiny_granite),
    "granite4": _wide(tiny.tiny_granite4, shared_intermediate_size=160),
    "minicpm": _wide(tiny.tiny_granite, attention_multiplier=0.25),
    "hunyuan": _own_heads(tiny.tiny_hunyuan),
    "apertus": _wide(tiny.tiny_apertus),
    "cohere": _wide(tiny.tiny_cohere),
    "cohere-head-norm": _wide(tiny.tiny_cohere, use_qk_norm=True, attention_bias=True),
    "cohere2": _wide(tiny.tiny_cohere2),
    "starcoder2": _wide(tiny.tiny_starcoder2, sliding_window=50),
    "arcee": _own_heads(tiny.tiny_arcee),
    "orion": _own_heads(tiny.tiny_orion),
    "index": _own_heads(tiny.tiny_index),
}
"""Builders by family. Families that transformers has no class for are in `REWRITTEN` too."""

_EXPERTS: dict[str, Any] = {**_OWN_HEADS, "moe_intermediate_size": 64}

EXPERT_FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3-moe": lambda: tiny.tiny_qwen3_moe(**_EXPERTS),
    "mixtral": _own_heads(tiny.tiny_mixtral),
    "gemmoe": _own_heads(tiny_gemmoe),
    "qwen2-moe": lambda: tiny.tiny_qwen2_moe(
        **{**_EXPERTS, "head_dim": 16}, shared_expert_intermediate_size=160
    ),
    "glm4-moe": lambda: tiny.tiny_glm4_moe(**_EXPERTS),
    "ernie4.5-moe": lambda: tiny.tiny_ernie_moe(**_EXPERTS),
    "hunyuan-moe": _own_heads(tiny.tiny_hunyuan_moe),
    "minimax-m2": _own_heads(tiny.tiny_minimax_m2, rope_parameters=tiny.HALF_ROPE),
    "qwen3-vl-moe": lambda: tiny.tiny_qwen3_vl_moe(**_EXPERTS),
    "granite-moe": lambda: tiny.tiny_granite_moe(intermediate_size=160),
    "gpt-oss": lambda **more: tiny.tiny_gpt_oss(head_dim=32, **more),
    "gemma4-moe": _wide(tiny.tiny_gemma4_moe, moe_intermediate_size=64),
    "llama4": lambda: tiny.tiny_llama4(
        hidden_size=96, head_dim=32, intermediate_size=64, intermediate_size_mlp=160
    ),
    "dbrx": lambda: tiny.tiny_dbrx(
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 3}
    ),
}
"""Builders of families with experts. Layer 1 of Qwen3-MoE and layer 0 of GLM-4.5 and ERNIE are
dense. Qwen2-MoE has a shared expert with a gate. Granite, gpt-oss, Gemma 4, Llama 4 and DBRX store
all experts in one tensor."""

_DELTA_NET: dict[str, Any] = {**_OWN_HEADS, "linear_value_head_dim": 32}
_EXPERTS_BESIDE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
_MAMBA: dict[str, Any] = {"hidden_size": 96, "head_dim": 16, "mamba_d_head": 32}

HYBRID_FAMILIES: dict[str, Callable[..., Any]] = {
    "lfm2": _wide(hybrids.tiny_lfm2, head_dim=16, block_multiple_of=32),
    "lfm2-moe": _wide(hybrids.tiny_lfm2_moe, head_dim=16, moe_intermediate_size=64),
    "qwen3.5": lambda: hybrids.tiny_qwen35(**_DELTA_NET),
    "qwen3.5-moe": lambda: hybrids.tiny_qwen35_moe(**_DELTA_NET, **_EXPERTS_BESIDE),
    "qwen3-next": lambda: hybrids.tiny_qwen3_next(**_DELTA_NET, **_EXPERTS_BESIDE),
    "granite4-hybrid": lambda: hybrids.tiny_granite_hybrid(**_MAMBA, shared_intermediate_size=160),
    "granite4-hybrid-moe": lambda: hybrids.tiny_granite_hybrid(
        **{**_MAMBA, "shared_intermediate_size": 96, "intermediate_size": 64},
        **{"num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "nemotron-h": lambda: hybrids.tiny_nemotron_h(
        **_OWN_HEADS,
        **{"mamba_head_dim": 32, "moe_intermediate_size": 64},
        moe_shared_expert_intermediate_size=96,
    ),
    "nemotron-3-super": lambda **more: hybrids.tiny_nemotron_h(
        **{**_OWN_HEADS, "mamba_head_dim": 32, "moe_intermediate_size": 128},
        **{"moe_shared_expert_intermediate_size": 96, "moe_latent_size": 64},
        **more,
    ),
    "kimi-linear": lambda: hybrids.tiny_kimi_linear(
        **{**_WIDTHS, "linear_head_dim": 32, "kv_lora_rank": 64, "v_head_dim": 32},
        moe_intermediate_size=64,
    ),
}
"""Builders of families whose layers are recurrent or attention. Experts of Nemotron 3 Super read
and write narrower states than the layers. Kimi-Linear has latent attention too."""

_LATENT: dict[str, Any] = {**_WIDTHS, "kv_lora_rank": 64, "v_head_dim": 32}

LATENT_FAMILIES: dict[str, Callable[..., Any]] = {
    "deepseek2": lambda: latent.tiny_deepseek2(**_LATENT, moe_intermediate_size=64),
    "deepseek3": lambda **more: latent.tiny_deepseek3(
        **_LATENT, moe_intermediate_size=64, q_lora_rank=32, **more
    ),
    "glm4.7-flash": lambda: latent.tiny_glm4_moe_lite(
        **_LATENT, moe_intermediate_size=64, q_lora_rank=32
    ),
    "mistral-small-4": lambda: latent.tiny_mistral4(
        **_LATENT, moe_intermediate_size=64, q_lora_rank=32
    ),
}
"""Builders of families with latent attention, all with experts and a dense layer 0."""

REWRITTEN: dict[str, Callable[[Path], Path]] = {
    "yi": as_yi,
    "internlm2": as_internlm2,
    "minicpm": as_minicpm,
    "orion": as_orion,
    "index": as_index,
    "qwen3-vl-moe-transposed": as_transposed_experts,
    "dbrx-renamed": as_renamed_dbrx,
    "gpt2-renamed": as_oldest_gpt2,
}
"""Functions that turn a saved folder into one of the family."""

MULTIMODAL = ("pixtral", "qwen2.5-vl", "qwen3-vl")
"""Families whose tiny model has a tower for pictures."""


def save_family(name: str, model: Any, folder: Path) -> Path:
    """Writes a model of `FAMILIES[name]` as the family's checkpoints are."""
    tiny.save(model, folder)
    return REWRITTEN.get(name, lambda unchanged: unchanged)(folder)
