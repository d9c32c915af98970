"""Values of published `config.json` files: one or more models of each family."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.layers import Dense, MoE
from support.model_configs import LLAMA, windows, write
from support.published_configs import LATER_FAMILIES
from support.published_moe_configs import MOE_FAMILIES

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


PUBLISHED |= LATER_FAMILIES | MOE_FAMILIES


@pytest.mark.parametrize("changes, expected", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configurations_of_each_family(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = read_hf_config(write(tmp_path, {**LLAMA, "num_hidden_layers": 3}, **changes))
    attention, rope = config.layers[0].attention, config.ropes[0]
    parts = [layer.feed_forward for layer in config.layers]
    experts = [part for part in parts if isinstance(part, MoE)]
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
        "positions": config.num_positions,
        "normalized": config.has_normalized_head,
        "rotated": [layer.attention.rope for layer in config.layers],
        "yarn": (rope.factor, pytest.approx(rope.attention_factor)),
        "temperature": attention.temperature,
        "temperatures": [layer.attention.temperature for layer in config.layers],
        "multipliers": pytest.approx(astuple(config.multipliers)),
        "inner": parts[0].inner_size,
        "experts": next(
            ((e.router.top_k, e.router.num_experts, e.intermediate_size) for e in experts), None
        ),
        "router": experts[0].router if experts else None,
        "shared": experts[0].shared if experts else None,
        "dense": [index for index, part in enumerate(parts) if isinstance(part, Dense)],
        "bias": (attention.has_qkv_bias, attention.has_output_bias),
        "head_dim": attention.head_dim,
        "kv_size": attention.kv_size,
        "chunks": [layer.attention.chunk for layer in config.layers],
        "clip": attention.clip,
        "caps": (attention.softcap, config.final_softcap),
        "scale": pytest.approx(attention.scale),
    }
    assert {key: found[key] for key in expected} == expected
