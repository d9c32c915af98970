"""Values of published `config.json` files: one or more models of each family."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from exl_core.arch.hf_config import read_hf_config
from support.model_configs import LLAMA, windows, write

# Published models: keys of their configurations besides the sizes, and the resulting values.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mistral 7B v0.1": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 32},
        {"windows": [32, 32, 32], "bias": (False, False)},
    ),
    "Mistral, defaults omitted": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "num_attention_heads": ...,
            "num_key_value_heads": ...,
        },
        {"windows": [4096, 4096, 4096], "head_dim": 128, "kv_size": 1024},
    ),
    "Mistral 7B v0.3": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"windows": [0, 0, 0], "bias": (False, False)},
    ),
    "Mistral Small 3.1": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {
                **LLAMA,
                "num_hidden_layers": 3,
                "head_dim": 32,
                "sliding_window": None,
            },
        },
        {"windows": [0, 0, 0], "head_dim": 32},
    ),
    "Qwen2.5 7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 32,
            "use_sliding_window": False,
            "max_window_layers": 2,
        },
        {"windows": [0, 0, 0], "bias": (True, False)},
    ),
    "Qwen2 with its window": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 32,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
        {"windows": [0, 0, 32], "bias": (True, False)},
    ),
    "Qwen2 with its window everywhere": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 32,
            "use_sliding_window": True,
            "max_window_layers": 0,
        },
        {"windows": [32, 32, 32]},
    ),
    "Qwen3 8B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 36,
        },
        {"windows": [0, 0, 0], "bias": (False, False), "head_dim": 128},
    ),
    "Seed-OSS 36B": (
        {
            "architectures": ["SeedOssForCausalLM"],
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "mlp_bias": False,
        },
        {"windows": [0, 0, 0], "bias": (True, False), "head_dim": 128},
    ),
    "Phi-3 mini 4k": (
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 32, "attention_bias": False},
        {"windows": [32, 32, 32], "bias": (False, False)},
    ),
    "Gemma 2 27B": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 144,
            "head_dim": 128,
            "sliding_window": 32,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {"windows": [32, 0, 32], "caps": (50.0, 30.0), "scale": 1 / 12, "head_dim": 128},
    ),
    "Gemma 2, defaults omitted": (
        {"architectures": ["Gemma2ForCausalLM"], "hidden_act": ...},
        {"windows": [4096, 0, 4096], "caps": (50.0, 30.0)},
    ),
    "Gemma 2, caps disabled": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "sliding_window": 32,
            "hidden_act": ...,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        {"caps": (None, None)},
    ),
}


PUBLISHED |= {
    "Yi 34B": (
        {
            "architectures": ["YiForCausalLM"],
            "hidden_size": 7168,
            "num_attention_heads": 56,
            "num_key_value_heads": 8,
            "rope_theta": 5000000.0,
        },
        {"head_dim": 128, "kv_size": 1024, "base": 5e6},
    ),
    "Pixtral 12B": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "vision_config": {"model_type": "pixtral"},
            "text_config": {
                "hidden_size": 5120,
                "head_dim": 128,
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
                "vocab_size": 131072,
            },
        },
        {"windows": [0] * 40, "head_dim": 128, "kv_size": 1024, "q_size": 4096, "inner": 14336},
    ),
    "Qwen2.5-VL 72B": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "max_window_layers": 80,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        {"windows": [0, 0, 0], "bias": (True, False), "head_dim": 128, "base": 1e6},
    ),
    "Qwen3-VL 32B": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {
                **LLAMA,
                "hidden_size": 5120,
                "num_hidden_layers": 64,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "model_type": "qwen3_vl_text",
                "rope_theta": 5000000,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
            },
        },
        {"windows": [0] * 64, "bias": (False, False), "q_size": 8192, "base": 5e6},
    ),
    "Phi-3 medium 128k": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "sliding_window": 131072,
            "rope_scaling": {
                "type": "su",
                "short_factor": [1.0] * 64,
                "long_factor": [2.0] * 64,
            },
        },
        {"windows": [131072] * 3, "rotary": 128, "longrope": (4096, 1.1902380714238083)},
    ),
    "Phi-4 mini": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 3072,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
            },
        },
        {"head_dim": 128, "rotary": 96, "longrope": (4096, 1.1902380714238083)},
    ),
    "Gemma 7B": (
        {
            "architectures": ["GemmaForCausalLM"],
            "hidden_act": "gelu",
            "hidden_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
        },
        {"windows": [0, 0, 0], "q_size": 4096, "scale": 1 / 16, "caps": (None, None)},
    ),
    "ERNIE 4.5 0.3B": (
        {
            "architectures": ["Ernie4_5ForCausalLM"],
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 500000.0,
            "use_bias": False,
        },
        {"bias": (False, False), "q_size": 2048, "base": 5e5},
    ),
    "SmolLM3 3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 8,
            "no_rope_layers": [1, 1, 1, 0] * 2,
            "no_rope_layer_interval": 4,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"rotated": [0, 0, 0, None] * 2, "head_dim": 128, "base": 5e6},
    ),
    "OLMo 2 32B": (
        {
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": False,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
        },
        {"windows": [0, 0, 0], "head_dim": 128, "bias": (False, False), "base": 5e5},
    ),
    "OLMo 3 32B": (
        {
            "architectures": ["Olmo3ForCausalLM"],
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
        },
        {"windows": [4096] * 3 + [0], "rotated": [1, 1, 1, 0], "yarn": (8.0, 1.2079441541679836)},
    ),
    "EXAONE 4 32B": (
        {
            "architectures": ["Exaone4ForCausalLM"],
            "hidden_size": 5120,
            "head_dim": 128,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "num_hidden_layers": 8,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1000000,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
        },
        {"windows": ([4096] * 3 + [0]) * 2, "rotated": [0, 0, 0, None] * 2, "q_size": 5120},
    ),
    "EXAONE 4 1.2B": (
        {
            "architectures": ["Exaone4ForCausalLM"],
            "hidden_size": 2048,
            "head_dim": 64,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 3,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
        },
        {"windows": [0] * 3, "rotated": [0, 0, 0], "head_dim": 64},
    ),
    "Devstral Small 2 24B": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {
                **LLAMA,
                "hidden_size": 5120,
                "head_dim": 128,
                "max_position_embeddings": 393216,
                "model_type": "ministral3",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rope_parameters": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 48.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 8192,
                    "rope_theta": 100000000.0,
                    "rope_type": "yarn",
                    "type": "yarn",
                },
                "sliding_window": None,
            },
        },
        {"windows": [0] * 40, "temperature": (0.1, 8192, 0), "yarn": (48.0, 1.0), "base": 1e8},
    ),
    "Granite 3.3 8B": (
        {
            "architectures": ["GraniteForCausalLM"],
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "hidden_size": 4096,
            "logits_scaling": 16.0,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "residual_multiplier": 0.22,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
        },
        {"scale": 1 / 128, "multipliers": (12.0, 0.22, 1 / 16), "base": 1e7},
    ),
    "MiniCPM 2B": (
        {
            "architectures": ["MiniCPMForCausalLM"],
            "dim_model_base": 256,
            "hidden_size": 2304,
            "num_attention_heads": 36,
            "num_key_value_heads": 36,
            "num_hidden_layers": 40,
            "scale_depth": 1.4,
            "scale_emb": 12,
        },
        {"multipliers": (12.0, 0.22135943621178655, 1 / 9), "head_dim": 64},
    ),
    "Command-R+ 104B": (
        {
            "architectures": ["CohereForCausalLM"],
            "hidden_size": 12288,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.8333333333333334,
            "max_position_embeddings": 8192,
            "model_max_length": 131072,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "rms_norm_eps": ...,
            "rope_theta": 75000000.0,
            "use_qk_norm": True,
        },
        {"multipliers": (1.0, 1.0, 5 / 6), "head_norm": "layer", "context": 131072, "eps": 1e-5},
    ),
    "Aya Expanse 32B": (
        {
            "architectures": ["CohereForCausalLM"],
            "hidden_size": 8192,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "model_max_length": 131072,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "rope_theta": 4000000.0,
            "use_qk_norm": False,
        },
        {"multipliers": (1.0, 1.0, 1 / 16), "head_norm": "none", "head_dim": 128},
    ),
    "Command-A 111B": (
        {
            "architectures": ["Cohere2ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 12288,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.25,
            "max_position_embeddings": 131072,
            "num_attention_heads": 96,
            "num_hidden_layers": 8,
            "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first",
            "rope_theta": 50000,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        {"windows": ([4096] * 3 + [0]) * 2, "rotated": [0, 0, 0, None] * 2, "base": 5e4},
    ),
    "StarCoder2 15B": (
        {
            "architectures": ["Starcoder2ForCausalLM"],
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 6144,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "num_attention_heads": 48,
            "num_key_value_heads": 4,
            "rope_theta": 100000,
            "sliding_window": 4096,
            "use_bias": True,
        },
        {"windows": [4096] * 3, "bias": (True, True), "head_dim": 128, "eps": 1e-5},
    ),
    "Arcee AFM 4.5B": (
        {
            "architectures": ["ArceeForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "relu2",
            "hidden_size": 2560,
            "max_position_embeddings": 65536,
            "mlp_bias": False,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 20.0,
                "mscale": 1.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "rope_theta": 10000.0,
        },
        {"bias": (False, False), "q_size": 2560},
    ),
    "Orion 14B": (
        {
            "architectures": ["OrionForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
        },
        {"head_dim": 128, "eps": 1e-5},
    ),
    "Index 1.9B": (
        {
            "architectures": ["IndexForCausalLM"],
            "hidden_size": 2048,
            "norm_head": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
        {"head_dim": 128, "normalized": True},
    ),
    "Gemma 4 31B": (
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": {
                **LLAMA,
                "attention_k_eq_v": True,
                "enable_moe_block": False,
                "final_logit_softcapping": 30.0,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size_per_layer_input": 0,
                "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                "model_type": "gemma4_text",
                "num_attention_heads": 32,
                "num_global_key_value_heads": 4,
                "num_hidden_layers": 6,
                "num_key_value_heads": 16,
                "num_kv_shared_layers": 0,
                "rope_parameters": {
                    "full_attention": {
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 1000000.0,
                        "rope_type": "proportional",
                    },
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
                "sliding_window": 1024,
            },
        },
        {
            "windows": [1024] * 5 + [0],
            "rotated": [1, 1, 1, 1, 1, 0],
            "scale": 1.0,
            "caps": (None, 30.0),
            "cache": ((16, 256),) * 5 + ((4, 512),),
            "rotary": 512,
            "pairs": 64,
        },
    ),
    "InternLM 2.5 20B": (
        {
            "architectures": ["InternLM2ForCausalLM"],
            "bias": False,
            "hidden_size": 6144,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "rope_theta": 50000000,
            "rope_scaling": {"factor": 1.0, "type": "dynamic"},
        },
        {"bias": (False, False), "head_dim": 128, "base": 5e7, "rotary": 128},
    ),
}


@pytest.mark.parametrize("changes, expected", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configurations_of_each_family(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = read_hf_config(write(tmp_path, {**LLAMA, "num_hidden_layers": 3}, **changes))
    attention, rope = config.layers[0].attention, config.ropes[0]
    found = {
        "windows": windows(config),
        "base": rope.base,
        "cache": config.kv_shapes,
        "pairs": rope.rotated_pairs,
        "rotary": rope.rotary_dim,
        "longrope": (rope.original_max_seq_len, pytest.approx(rope.attention_factor)),
        "q_size": attention.q_size,
        "head_norm": attention.head_norm.value,
        "context": config.max_seq_len,
        "eps": config.norm_eps,
        "normalized": config.has_normalized_head,
        "rotated": [layer.attention.rope for layer in config.layers],
        "yarn": (rope.factor, pytest.approx(rope.attention_factor)),
        "temperature": attention.temperature,
        "multipliers": pytest.approx(astuple(config.multipliers)),
        "inner": config.layers[0].dense.intermediate_size,
        "bias": (attention.has_qkv_bias, attention.has_output_bias),
        "head_dim": attention.head_dim,
        "kv_size": attention.kv_size,
        "caps": (attention.softcap, config.final_softcap),
        "scale": pytest.approx(attention.scale),
    }
    assert {key: found[key] for key in expected} == expected
