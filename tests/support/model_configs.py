"""Configurations of small models, as `config.json` files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exl_core.arch.spec import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
}
GEMMA = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 32,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    merged = {**config, **changes}
    kept = {key: value for key, value in merged.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def windows(config: ModelConfig) -> list[int]:
    return [layer.attention.window for layer in config.layers]
