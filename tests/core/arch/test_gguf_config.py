"""GGUF metadata: values that are read, and values that are refused instead of guessed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from exl_core.arch import registry
from exl_core.arch.gguf_config import read_gguf_config
from exl_core.arch.names import GGUF, Fused
from exl_core.arch.registry import find_by_gguf_name
from exl_core.arch.spec import ModelConfig, RopeMethod
from exl_core.errors import ConfigError, ModelError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.tokens": ["a"] * 100,
    "tokenizer.ggml.eos_token_id": 2,
}


def read(
    changes: dict[str, Any],
    tensors: tuple[str, ...] = (),
    factors: dict[str, tuple[float, ...]] | None = None,
) -> ModelConfig:
    fields = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    return read_gguf_config(fields, tensors, "m.gguf", factors)


def test_ties_and_biases_are_inferred_from_the_tensors() -> None:
    tied = read({})
    untied = read({}, ("output.weight", "blk.0.attn_q.bias"))
    assert (tied.has_tied_embeddings, untied.has_tied_embeddings) == (True, False)
    biases = [config.layers[0].attention.has_qkv_bias for config in (tied, untied)]
    assert biases == [False, True]
    assert tied.vocab_size == 100
    assert tied.ropes[0].base == 5e5


def test_biases_of_fused_tensors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    form = replace(GGUF, fused=(Fused("attn_qkv", ("q", "k", "v")),))
    fused = replace(find_by_gguf_name("llama", where="a test"), gguf=form)
    monkeypatch.setattr(registry, "ARCHITECTURES", (fused,))
    found = read({}, ("blk.0.attn_qkv.bias",)).layers[0].attention
    assert (found.has_qkv_bias, found.has_output_bias) == (True, False)


def test_numbers_may_differ_by_layer() -> None:
    config = read(
        {
            "llama.attention.head_count_kv": [2, 2, 4],
            "llama.attention.head_count": [4, 4, 8],
            "llama.feed_forward_length": [128, 64, 32],
        }
    )
    assert config.kv_shapes == ((2, 16), (2, 16), (4, 16))
    assert [layer.attention.num_q_heads for layer in config.layers] == [4, 4, 8]
    assert [layer.dense.intermediate_size for layer in config.layers] == [128, 64, 32]


LONGROPE: dict[str, Any] = {
    "llama.rope.scaling.original_context_length": 64,
    "llama.rope.scaling.attn_factor": 1.25,
}
FACTORS: dict[str, tuple[float, ...]] = {
    "rope_factors_short.weight": (1.0,) * 8,
    "rope_factors_long.weight": (4.0,) * 8,
}


def test_two_tensors_of_factors_are_for_short_and_long_contexts() -> None:
    rope = read(LONGROPE, factors=FACTORS).ropes[0]
    assert (rope.method, rope.attention_factor) == (RopeMethod.LONGROPE, 1.25)
    assert rope.fitted(64).frequency_divisors == (1.0,) * 8
    assert rope.fitted(65).frequency_divisors == (4.0,) * 8
    with pytest.raises(ConfigError, match="without 'rope_factors_short"):
        read(LONGROPE, factors={"rope_factors_long.weight": (4.0,) * 8})


def test_phi3_files_state_their_window() -> None:
    fields = {key.replace("llama.", "phi3."): value for key, value in LLAMA.items()}
    for length, expected in ((32, 32), (0, 0), (None, 0)):
        stated = {"general.architecture": "phi3", "phi3.attention.sliding_window": length}
        config = read_gguf_config({**fields, **stated}, (), "m.gguf")
        assert [layer.attention.window for layer in config.layers] == [expected] * 3


def test_an_unknown_architecture_names_the_nearest_one() -> None:
    with pytest.raises(UnsupportedModelError, match="nearest name is 'llama'"):
        read({"general.architecture": "llama9"})


def test_yarn_multiplies_its_own_factor_by_the_stored_one() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 2.0}
    rope = read({f"llama.rope.scaling.{key}": value for key, value in scaling.items()}).ropes[0]
    assert rope.method is RopeMethod.YARN
    assert rope.original_max_seq_len == 128
    assert rope.attention_factor == pytest.approx(2.0 * (0.1 * 1.3862943611 + 1.0))


def test_gemma3_gets_its_windows_and_local_rope_base() -> None:
    fields = {key.replace("llama.", "gemma3."): value for key, value in LLAMA.items()}
    fields |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 32}
    config = read_gguf_config(fields, (), "m.gguf")
    assert [layer.attention.window for layer in config.layers] == [32] * 3
    ropes = [config.rope_of(layer.attention) for layer in config.layers]
    assert [rope and rope.base for rope in ropes] == [10000.0] * 3
    assert config.layers[0].attention.head_dim == 256  # the family's default, not 64 / 4


def test_gemma2_files_without_window_or_caps_get_the_defaults() -> None:
    fields = {key.replace("llama.", "gemma2."): value for key, value in LLAMA.items()}
    config = read_gguf_config({**fields, "general.architecture": "gemma2"}, (), "m.gguf")
    assert [layer.attention.window for layer in config.layers] == [4096, 0, 4096]
    assert (config.layers[0].attention.softcap, config.final_softcap) == (50.0, 30.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "mamba"}, "'mamba'.*llama, .*gemma3"),
    "missing": ({"llama.block_count": None}, "'block_count' is missing"),
    "layers": ({"llama.block_count": 2**31 - 1}, "1 to 4096"),
    "short-list": ({"llama.attention.head_count": [1, 2]}, "does not describe the layers.*3 num"),
    "list-of-lists": ({"llama.attention.head_count": [[1]] * 3}, "no usable value"),
    "empty-list": ({"llama.attention.head_count": []}, "does not describe the layers"),
    "temperature": ({"llama.attention.temperature_scale": 0.1}, "temperature_scale"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    "scaling-key": ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    "old-scaling-key": ({"llama.rope.scale_linear": 4.0}, "scale_linear"),
    "base": ({"llama.rope.freq_base": 1.0}, "RoPE base"),
    "rotation": ({"llama.rope.dimension_count": 17}, "even number"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_impossible_metadata_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(changes)


@pytest.mark.parametrize("factors", [(1.0,) * 7, (0.0,) * 8, (float("nan"),) * 8, (-1.0,) * 8])
def test_rope_factors_that_cannot_divide_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="RoPE factors"):
        read({}, factors={"rope_freqs.weight": factors})


def test_an_unsupported_rope_scaling_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="Supported"):
        read({"llama.rope.scaling.type": "longrope"})


@pytest.mark.parametrize("size", [10**8, 2**32, 2**63])
@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "rope.dimension_count",
        "vocab_size",
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_computed_from_them(
    key: str, size: int
) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"'{key}' has no usable value.*an integer from 1 to"):
        read({f"llama.{key}": size})
    assert time.monotonic() - started < 0.5
