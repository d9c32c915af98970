"""`config.json`: old and new key names, defaults of the families, and refused values."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.spec import RopeMethod
from exl_core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from support.model_configs import GEMMA, LLAMA, windows, write


def test_llama_configuration(tmp_path: Path) -> None:
    config = read_hf_config(write(tmp_path, LLAMA))
    attention = config.layers[0].attention
    assert (attention.q_size, attention.kv_size, attention.head_dim) == (64, 32, 16)
    assert attention.scale == 0.25
    assert windows(config) == [0] * 7
    assert config.eos_ids == (2, 5)
    assert not config.has_tied_embeddings
    assert config.ropes[0].base == 10000.0


def test_generation_config_adds_eos_ids_once(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert read_hf_config(tmp_path).eos_ids == (2, 5, 7)


def test_minus_one_stands_for_no_token(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, bos_token_id=-1, eos_token_id=[2, -1], pad_token_id=-1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1}')
    config = read_hf_config(tmp_path)
    assert (config.bos_id, config.eos_ids, config.pad_id) == (None, (2,), None)


def test_gemma3_old_and_new_keys_give_the_same_configuration(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = write(
        tmp_path,
        GEMMA,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling=scaling,
        sliding_window_pattern=3,
    )
    from_old = read_hf_config(old)
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    new = write(
        tmp_path,
        GEMMA,
        layer_types=(kinds * 3)[:7],
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert read_hf_config(new) == from_old
    assert from_old.ropes[0].method is RopeMethod.LINEAR
    assert from_old.ropes[1].base == 2e4
    assert windows(from_old)[:4] == [32, 32, 0, 32]
    assert [layer.attention.rope for layer in from_old.layers][:4] == [1, 1, 0, 1]
    assert from_old.layers[0].attention.scale == 0.125


def test_a_multimodal_configuration_may_omit_default_values(tmp_path: Path) -> None:
    text: dict[str, object] = {"hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    top = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    config = read_hf_config(write(tmp_path, top, text_config=text))
    attention = config.layers[0].attention
    assert (attention.num_q_heads, config.kv_shapes[0]) == (8, (4, 256))
    assert config.vocab_size == 262208
    assert config.eos_ids == (1, 106)
    assert config.has_tied_embeddings
    assert windows(config).count(0) == 5


REFUSED = {
    "unknown-architecture": (
        {"architectures": ["MambaForCausalLM"]},
        "MambaForCausalLM.*LlamaForCausalLM",
    ),
    "near-architecture": (
        {"architectures": ["LlamaForCausalML"]},
        "nearest name is 'LlamaForCausalLM'",
    ),
    "gemma-3n": (
        {"architectures": ["Gemma3nForConditionalGeneration"]},
        "Gemma3nForConditionalGeneration.*embeddings of their own.*share keys and values",
    ),
    "language-model": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {"model_type": "mistral9"},
        },
        "'Mistral3ForConditionalGeneration' with a language model 'mistral9'.*mistral4",
    ),
    "rope-method": ({"rope_scaling": {"type": "unheard", "factor": 2.0}}, "'unheard'.*longrope"),
    "growing-queries": (
        {
            "architectures": ["LlamaForCausalLM"],
            "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "llama_4_scaling_beta": 0.1},
        },
        "llama_4_scaling_beta",
    ),
    "activation": ({"hidden_act": "relu"}, "relu"),
    "per-layer-embeddings": (
        {"architectures": ["Gemma4ForCausalLM"], "sliding_window": 32},
        "embeddings of their own for each layer",
    ),
    "shared-caches": (
        {
            "architectures": ["Gemma4ForCausalLM"],
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
            "sliding_window": 32,
        },
        "share keys and values",
    ),
    "chunks-without-rope": (
        {
            "architectures": ["Llama4ForCausalLM"],
            "intermediate_size_mlp": 32,
            "layer_types": ["chunked_attention"] * 2,
            "no_rope_layers": [1, 0],
            "num_hidden_layers": 2,
            "num_local_experts": 2,
        },
        "chunks of attention in other layers",
    ),
    "bidirectional": ({"use_bidirectional_attention": True}, "bidirectional"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_unsupported_features_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_hf_config(write(tmp_path, LLAMA, **changes))


BROKEN = {
    "missing": ({"hidden_size": ...}, "'hidden_size' is missing"),
    "text": ({"hidden_size": "64"}, "'hidden_size' has no usable value"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers"),
    "layers": ({"num_hidden_layers": 2**31 - 1}, "1 to 4096"),
    "endless-digits": ({"rope_theta": 10**400}, "rope_theta.*integer of 1329 bits"),
    "tiny-eps": ({"rms_norm_eps": 1e-320}, "rms_norm_eps"),
    "partial": ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    "base-one": ({"rope_theta": 1.0}, "RoPE base"),
    "absurd": ({"vocab_size": 2**40}, "vocab_size"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "no-architecture": ({"architectures": []}, "architectures"),
    "heads": ({"num_key_value_heads": 3}, "shared out evenly"),
    "eos-negative": ({"eos_token_id": -2}, "eos_token_id"),
    "eos-outside": ({"eos_token_id": 100}, "outside the vocabulary"),
    "odd-head": ({"head_dim": 15}, "even number"),
    "ntk-of-two": (
        {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0}},
        "even number",
    ),
    "llama3-bands": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 8.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "high_freq_factor of at least",
    ),
    "longrope-lists": (
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 7,
            }
        },
        "RoPE factors has the wrong length.*expected 8",
    ),
    "longrope-list": ({"rope_scaling": {"type": "su", "short_factor": 2.0}}, "short_factor"),
    "windows": ({**GEMMA, "layer_types": ["full_attention"]}, "layer_types"),
    "no-window": ({**GEMMA, "sliding_window": ...}, "sliding_window"),
}


@pytest.mark.parametrize("changes, message", BROKEN.values(), ids=BROKEN)
def test_impossible_values_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_config(write(tmp_path, LLAMA, **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000, "1" * 5000])
def test_a_configuration_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_the_error_for_an_empty_directory_describes_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json.*A model directory has"):
        read_hf_config(tmp_path)


def test_the_error_for_a_directory_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="name one of them"):
        read_hf_config(tmp_path)


HUGE = (10**8, 2**31 - 1, 2**31, 2**70)
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("key", SIZES)
def test_absurd_sizes_are_refused_before_anything_is_computed_from_them(
    tmp_path: Path, key: str, size: int
) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"'{key}' has no usable value.*an integer from 1 to"):
        read_hf_config(write(tmp_path, LLAMA, **{key: size}))
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("size", (*HUGE[:2], 2**24))
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_no_number_of_a_configuration_takes_long_to_read(
    tmp_path: Path, config: dict[str, Any], size: int
) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    full = {**config, "rope_scaling": scaling, "sliding_window_pattern": 2, "head_dim": 16}
    numbers = [key for key, value in full.items() if isinstance(value, int | float)]
    for key in (*numbers, "max_window_layers"):
        started = time.monotonic()
        try:
            read_hf_config(write(tmp_path, full, **{key: size}))
        except ConfigError as error:
            assert "\n" not in str(error)
        assert time.monotonic() - started < 0.5, key


def test_a_list_of_many_end_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 4096 token ids"):
        read_hf_config(write(tmp_path, LLAMA, eos_token_id=[2] * 5000))
