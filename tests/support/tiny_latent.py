"""Tiny checkpoints of models with latent attention, with random weights."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from support.tiny_models import COMMON, EXPERTS, randomized

_LATENT: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    **{"num_key_value_heads": 6, "num_attention_heads": 6, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20},
    **{**EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
}


def tiny_deepseek2(**changes: Any) -> DeepseekV2ForCausalLM:
    """DeepSeek-V2-Lite: queries without a latent vector, experts without groups, layer 0 dense."""
    defaults = {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2}
    return randomized(DeepseekV2ForCausalLM(DeepseekV2Config(**{**defaults, **changes})))


def tiny_deepseek3(**changes: Any) -> DeepseekV3ForCausalLM:
    """Layer 0 is dense. YaRN changes the factor of the scores too."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
    defaults = {**_LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "rope_parameters": rope}
    return randomized(DeepseekV3ForCausalLM(DeepseekV3Config(**{**defaults, **changes})))


def tiny_glm4_moe_lite(**changes: Any) -> Glm4MoeLiteForCausalLM:
    """Layer 0 is dense, and there is one group."""
    defaults = {**_LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1}
    defaults.pop("first_k_dense_replace")
    return randomized(Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**{**defaults, **changes})))


def tiny_mistral4(**changes: Any) -> Mistral4ForCausalLM:
    """Layer 0 is dense. Queries grow from position 32 on."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 32}
    rope |= {"llama_4_scaling_beta": 0.5, "max_position_embeddings": 2048}
    defaults = {**_LATENT, "q_lora_rank": 24, "rope_parameters": rope}
    defaults |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
    return randomized(Mistral4ForCausalLM(Mistral4Config(**{**defaults, **changes})))
