"""Tiny checkpoints of hybrids, whose layers are recurrent or attention, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from support.tiny_models import COMMON, EXPERTS, GRANITE_MULTIPLIERS, randomized


def tiny_lfm2(**changes: Any) -> Lfm2ForCausalLM:
    defaults = {
        **COMMON,
        "num_hidden_layers": 5,
        "hidden_size": 120,  # heads share it
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "block_multiple_of": 24,
        "block_ffn_dim_multiplier": 1.3,
    }
    return randomized(Lfm2ForCausalLM(Lfm2Config(**{**defaults, **changes})))


def tiny_lfm2_moe(**changes: Any) -> Lfm2MoeForCausalLM:
    defaults = {
        **COMMON,
        **EXPERTS,
        "num_hidden_layers": 4,
        "hidden_size": 120,  # heads share it
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_experts": 8,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    }
    model = randomized(Lfm2MoeForCausalLM(Lfm2MoeConfig(**{**defaults, **changes})))
    generator = torch.Generator().manual_seed(21)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model


def tiny_granite_hybrid(**changes: Any) -> GraniteMoeHybridForCausalLM:
    defaults = {
        **COMMON,
        **GRANITE_MULTIPLIERS,
        "head_dim": 12,
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
        "mamba_n_heads": 6,
        "mamba_d_head": 24,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "shared_intermediate_size": 112,
        "num_local_experts": 0,
        "time_step_limit": [0.01, 2.0],
    }
    config = GraniteMoeHybridConfig(**{**defaults, **changes})
    return randomized(GraniteMoeHybridForCausalLM(config))


def tiny_nemotron_h(**changes: Any) -> NemotronHForCausalLM:
    defaults = {
        **{key: value for key, value in COMMON.items() if key != "num_hidden_layers"},
        **EXPERTS,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "attention", "moe"],
        **{"mamba_num_heads": 6, "mamba_head_dim": 28, "ssm_state_size": 16, "n_groups": 2},
        **{"n_routed_experts": 8, "moe_shared_expert_intermediate_size": 48},
        **{"routed_scaling_factor": 2.5, "time_step_min": 0.5},  # clamps many steps
        **{"n_group": 4, "topk_group": 2},
    }
    return randomized(NemotronHForCausalLM(NemotronHConfig(**{**defaults, **changes})))


def tiny_kimi_linear(**changes: Any) -> KimiLinearForCausalLM:
    """Layer 0 is dense, layer 2 has latent attention."""
    defaults = {
        **{key: value for key, value in COMMON.items() if key != "head_dim"},
        **EXPERTS,
        **{"num_hidden_layers": 4, "num_key_value_heads": 6, "num_experts": 8},
        **{"kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20},
        **{"n_group": 2, "topk_group": 1, "linear_num_heads": 3, "linear_head_dim": 20},
        "layer_types": [
            *("linear_attention", "linear_attention", "full_attention", "linear_attention")
        ],
    }
    return randomized(KimiLinearForCausalLM(KimiLinearConfig(**{**defaults, **changes})))


_DELTA_NET: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "head_dim": 32,  # a quarter of it is rotated
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "full_attention_interval": 3,
}


def tiny_qwen35(**changes: Any) -> Qwen3_5ForCausalLM:
    return randomized(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_DELTA_NET, **changes})))


def tiny_qwen35_moe(**changes: Any) -> Qwen3_5MoeForCausalLM:
    experts = {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40}
    defaults = {**_DELTA_NET, **experts, "moe_intermediate_size": 24}
    return randomized(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**defaults, **changes})))


def tiny_qwen3_next(**changes: Any) -> Qwen3NextForCausalLM:
    experts = {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40}
    defaults = {**_DELTA_NET, **experts, "mlp_only_layers": [1]}
    return randomized(Qwen3NextForCausalLM(Qwen3NextConfig(**{**defaults, **changes})))
