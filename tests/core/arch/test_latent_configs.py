"""Published numbers of models with latent attention, and the numbers that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exl_core.arch.gguf_config import read_gguf_config
from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.layers import (
    MLA,
    MoE,
    QueryTemperature,
    Router,
    RouterBias,
    Scores,
    SharedExpert,
)
from exl_core.cache.format import KVFormat, kv_bytes_per_token
from exl_core.errors import UnsupportedModelError
from exl_core.parallel.plan import Rank, share_config
from support.model_configs import LLAMA, write

SIZES: dict[str, Any] = {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"hidden_act": "silu", "num_hidden_layers": 4},
}
YARN: dict[str, Any] = {
    **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32, "beta_slow": 1},
}
V2_LITE = {
    **{"architectures": ["DeepseekV2ForCausalLM"], **SIZES, "hidden_size": 2048},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
    **{"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1},
    **{"topk_group": 1, "topk_method": "greedy", "moe_intermediate_size": 1408},
    **{"first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
V3 = {
    **{"architectures": ["DeepseekV3ForCausalLM"], **SIZES, "hidden_size": 7168},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8},
    **{"topk_group": 4, "topk_method": "noaux_tc", "moe_intermediate_size": 2048},
    **{"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
GLM = {
    **{"architectures": ["Glm4MoeLiteForCausalLM"], **SIZES, "hidden_size": 2048},
    **{"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768},
    **{"qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "n_group": 1},
    **{"num_experts_per_tok": 4, "n_shared_experts": 1, "topk_group": 1},
    **{"topk_method": "noaux_tc", "moe_intermediate_size": 1536, "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "rope_theta": 1000000},
}
MISTRAL_SMALL4 = {
    **{"architectures": ["Mistral4ForCausalLM"], "hidden_act": "silu", "num_hidden_layers": 4},
    **{"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32, "n_group": 1},
    **{"n_routed_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "topk_group": 1},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 0, "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.0, "max_position_embeddings": 1048576},
    "rope_parameters": {
        **{"type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0},
        **{"beta_slow": 1.0, "original_max_position_embeddings": 8192, "mscale": 1.0},
        **{"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
}
SIGMOID: dict[str, Any] = {"scores": Scores.SIGMOID, "bias": RouterBias.CHOICE, "eps": 1e-20}


def squared_magnitude(scale: float) -> float:
    return (0.1 * scale * math.log(40) + 1) ** 2


PUBLISHED: dict[str, tuple[dict[str, Any], MLA, Router, SharedExpert, int]] = {
    "DeepSeek-V2-Lite": (
        V2_LITE,
        MLA(16, 0, 512, 128, 64, 128, 192**-0.5 * squared_magnitude(0.707)),
        Router(64, 6, group_scores=1, normalizes=False),
        SharedExpert(2816),
        1,
    ),
    "DeepSeek-V3": (
        V3,
        MLA(128, 1536, 512, 128, 64, 128, 192**-0.5 * squared_magnitude(1.0)),
        Router(256, 8, groups=8, kept_groups=4, factor=2.5, **SIGMOID),
        SharedExpert(2048),
        3,
    ),
    "Mistral-Small-4": (
        MISTRAL_SMALL4,
        MLA(
            *(32, 1024, 256, 64, 64, 128, 128**-0.5 * squared_magnitude(1.0)),
            temperature=QueryTemperature(0.1, 8192),
        ),
        Router(128, 4, eps=1e-20),
        SharedExpert(2048),
        0,
    ),
    "GLM-4.7-Flash": (
        GLM,
        MLA(20, 768, 512, 192, 64, 256, 256**-0.5),
        Router(64, 4, factor=1.8, **SIGMOID),
        SharedExpert(1536),
        1,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers(tmp_path: Path, name: str) -> None:
    changes, latent, router, shared, dense = PUBLISHED[name]
    config = read_hf_config(write(tmp_path, LLAMA, **changes))

    mixer, part = config.layers[-1].mixer, config.layers[-1].feed_forward
    assert isinstance(mixer, MLA)
    assert isinstance(part, MoE)
    assert math.isclose(mixer.scale, latent.scale, rel_tol=1e-9)
    assert mixer == replace(latent, scale=mixer.scale)
    assert (part.router, part.shared) == (router, shared)
    is_sparse = [isinstance(layer.feed_forward, MoE) for layer in config.layers]
    assert is_sparse == [layer >= dense for layer in range(4)]
    row = latent.row_dim
    assert kv_bytes_per_token(config.kv_shapes, KVFormat.FP16) == 4 * 2 * row
    assert kv_bytes_per_token(config.kv_shapes, KVFormat.Q6) == 4 * (row + row // 16)


def test_kimi_is_read_from_its_text_config(tmp_path: Path) -> None:
    text = {key: value for key, value in V3.items() if key != "architectures"}
    changes = {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "num_attention_heads": 64}
    text |= {**changes, "vocab_size": 163840, "intermediate_size": 18432}
    top = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    config = read_hf_config(write(tmp_path, top))
    assert config.arch.name == "deepseek3"
    assert config.vocab_size == 163840
    part = config.layers[-1].feed_forward
    assert isinstance(part, MoE)
    assert (part.router.num_experts, part.router.groups) == (384, 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rope-rows": ({**V3, "rope_interleave": False}, "rope_interleave"),
    "router": ({**V3, "topk_method": "hash"}, "topk_method"),
    "normalized-v2": ({**V2_LITE, "norm_topk_prob": True}, "norm_topk_prob"),
    "indexer": ({**V3, "architectures": ["DeepseekV32ForCausalLM"]}, "indexer"),
    "glm5": ({**V3, "architectures": ["GlmMoeDsaForCausalLM"]}, "indexer"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_unsupported_variants_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_hf_config(write(tmp_path, LLAMA, **changes))


def test_gguf_files_have_the_numbers_of_their_checkpoints(tmp_path: Path) -> None:
    sizes = {"block_count": 4, "embedding_length": 7168, "feed_forward_length": 18432}
    own: dict[str, object] = {
        **{**sizes, "context_length": 163840, "vocab_size": 129280},
        **{"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0},
        **{
            "attention.head_count": 128,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 1536,
        },
        **{"attention.kv_lora_rank": 512, "attention.key_length": 576},
        **{"attention.value_length": 512, "attention.key_length_mla": 192},
        **{"attention.value_length_mla": 128, "rope.dimension_count": 64},
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0},
        **{"rope.scaling.original_context_length": 4096, "rope.scaling.yarn_log_multiplier": 0.1},
        **{"expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 2048},
        **{"expert_shared_count": 1, "expert_group_count": 8, "expert_group_used_count": 4},
        **{"expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2},
        "leading_dense_block_count": 3,
    }
    metadata = {f"deepseek2.{key}": value for key, value in own.items()}
    names = {"output.weight", "blk.0.attn_q_a.weight", "blk.3.ffn_gate_inp.weight"}
    config = read_gguf_config(metadata | {"general.architecture": "deepseek2"}, names, "a test")

    expected = read_hf_config(write(tmp_path, LLAMA, **V3)).layers[-1]
    found = config.layers[-1].mixer
    assert isinstance(found, MLA) and isinstance(expected.mixer, MLA)
    assert math.isclose(found.scale, expected.mixer.scale, rel_tol=1e-9)
    assert replace(found, scale=0.0) == replace(expected.mixer, scale=0.0, has_split_up=True)
    assert config.layers[-1].feed_forward == expected.feed_forward


def test_ranks_divide_the_heads_and_cache_whole_rows(tmp_path: Path) -> None:
    config = read_hf_config(write(tmp_path, LLAMA | V2_LITE))
    parts = [share_config(config, Rank(index, 3)) for index in range(3)]
    mixers = [part.layers[-1].mixer for part in parts]
    assert [one.num_q_heads for one in mixers if isinstance(one, MLA)] == [5, 5, 6]
    assert all(part.kv_shapes == config.kv_shapes for part in parts)
