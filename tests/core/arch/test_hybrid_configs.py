"""Hybrids: recurrent layers from published `config.json` files and from metadata of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exl_core.arch.gguf_config import read_gguf_config
from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.layers import (
    MLA,
    Activation,
    Attention,
    GatedDeltaNet,
    KimiDeltaNet,
    Mamba2,
    MoE,
    NoFeedForward,
    NoMixer,
    Router,
    RouterBias,
    Scores,
    SharedExpert,
    ShortConv,
)
from exl_core.arch.spec import ModelConfig
from exl_core.errors import ConfigError, UnsupportedModelError

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "vocab_size": 65536,
}
QWEN35_MOE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
}


GRANITE4_H_TINY = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 4],
    "logits_scaling": 6,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 10,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}


def read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_hf_config(folder)


def test_lfm2_has_convolutions_between_layers_of_attention(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2)
    attention = [i for i, layer in enumerate(config.layers) if layer.state_shape is None]
    assert attention == [2, 5, 8, 10, 12, 14]
    assert config.layers[0].mixer == ShortConv(2048, 3)
    assert config.layers[0].feed_forward.inner_size == 8192
    assert config.has_tied_embeddings
    assert config.state_bytes == 10 * 2 * 2048 * 4


def test_qwen35_has_delta_nets_between_layers_of_attention(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN35_MOE)
    attention = [i for i, layer in enumerate(config.layers) if layer.state_shape is None]
    assert attention == list(range(3, 40, 4))
    assert config.layers[0].mixer == GatedDeltaNet(16, 32, 128, 128, 4)
    assert config.layers[3].attention.has_gate
    assert config.ropes[0].rotary_dim == 64
    assert config.state_bytes == 30 * 4 * (32 * 128 * 128 + 3 * 8192)


def test_granite4_has_mamba_layers_and_attention_without_rope(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE4_H_TINY)
    attention = [i for i, layer in enumerate(config.layers) if layer.state_shape is None]
    assert attention == [5]
    assert config.layers[0].mixer == Mamba2(48, 64, 128, 1, 4)
    assert config.layers[5].attention.rope is None
    part = config.layers[5].feed_forward
    assert isinstance(part, MoE)
    assert (part.router.num_experts, part.router.top_k, part.intermediate_size) == (64, 6, 512)
    assert part.shared == SharedExpert(1024)
    limited = read(tmp_path, {**GRANITE4_H_TINY, "time_step_limit": [0.1, 2]}).layers[0].mixer
    assert limited == Mamba2(48, 64, 128, 1, 4, steps=(0.1, 2.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"mamba_n_heads": 47},
        {"mamba_n_groups": 5},
        {"time_step_limit": [2, 1]},
        {"time_step_limit": [0, 10**400]},  # no float
        {"time_step_limit": [False, True]},
        {"time_step_limit": "0, 1"},
    ],
)
def test_sizes_of_mamba_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        read(tmp_path, {**GRANITE4_H_TINY, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["conv"] * 15},
        {"layer_types": ["conv"] * 15 + ["mamba"]},
        {"layer_types": ["conv"] * 16},  # no attention at all
        {"conv_L_cache": 1},
        {"full_attn_idxs": [2, 16]},  # of layers 0 to 15
        {"block_ffn_dim_multiplier": 1e30},
        {"block_ffn_dim_multiplier": 1e-9},
    ],
)
def test_layers_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read(tmp_path, {**LFM2, **changes})


def test_heads_of_a_delta_net_must_fit_each_other(tmp_path: Path) -> None:
    text = {**QWEN35_MOE["text_config"], "linear_num_value_heads": 24}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="value heads"):
        read(tmp_path, {**QWEN35_MOE, "text_config": text})


def metadata(name: str, **own: Any) -> dict[str, Any]:
    usual = {
        "block_count": 4,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "context_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 100,
    }
    values = usual | {key.replace("__", "."): value for key, value in own.items()}
    return {"general.architecture": name} | {f"{name}.{key}": v for key, v in values.items()}


def test_gguf_files_mark_convolutions_by_layers_without_key_heads() -> None:
    own = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2]}
    config = read_gguf_config(metadata("lfm2", **own), {"output.weight"}, "file")
    assert [layer.state_shape is not None for layer in config.layers] == [True, False, True, False]


def test_gguf_files_of_qwen35_have_tiled_value_heads() -> None:
    own = {
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "rope.dimension_count": 8,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 120,
    }
    config = read_gguf_config(metadata("qwen35", **own), {"output.weight"}, "file")
    assert config.layers[0].mixer == GatedDeltaNet(2, 6, 16, 20, 4, is_tiled=True)
    assert config.layers[3].state_shape is None


GRANITE_HYBRID: dict[str, Any] = {
    "attention.head_count_kv": [0, 2, 0, 0],
    "rope.scaling.finetuned": False,
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2},
    **{"ssm.time_step_rank": 8, "ssm.inner_size": 128, "expert_count": 0},
    "expert_shared_feed_forward_length": 80,
}


def test_gguf_files_of_granite4_mark_mamba_by_layers_without_key_heads() -> None:
    names = {"output.weight", "blk.0.ssm_conv1d.bias"}
    config = read_gguf_config(metadata("granitehybrid", **GRANITE_HYBRID), names, "file")
    assert config.layers[0].mixer == Mamba2(8, 16, 16, 2, 4)
    assert config.layers[1].attention.rope is None
    assert config.layers[1].dense.intermediate_size == 80


@pytest.mark.parametrize("changes", [{"ssm.inner_size": 129}, {"ssm.group_count": 3}])
def test_gguf_files_with_sizes_of_mamba_that_do_not_fit_are_refused(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="Mamba-2"):
        read_gguf_config(metadata("granitehybrid", **(GRANITE_HYBRID | changes)), set(), "file")


NEMOTRON3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}


def test_nemotron3_has_one_part_in_each_layer(tmp_path: Path) -> None:
    config = read(tmp_path, NEMOTRON3_NANO)
    assert config.num_layers == 52
    mixers = [type(layer.mixer) for layer in config.layers]
    assert [mixers.count(kind) for kind in (Mamba2, Attention, NoMixer)] == [23, 6, 23]
    assert config.layers[0].mixer == Mamba2(64, 64, 128, 8, 4, steps=(0.001, None))
    assert config.layers[0].feed_forward == NoFeedForward()
    assert config.layers[1].feed_forward == MoE(
        Router(128, 6, Scores.SIGMOID, RouterBias.CHOICE, factor=2.5, eps=1e-20),
        1856,
        Activation.RELU2,
        SharedExpert(3712),
        is_gated=False,
    )
    assert config.layers[5].attention.rope is None
    assert config.num_positions == 0


def test_nemotron_may_name_its_layers_and_narrow_its_experts(tmp_path: Path) -> None:
    names = {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "moe_latent_size": 1024}
    values = {key: value for key, value in NEMOTRON3_NANO.items() if "pattern" not in key} | names
    layers = read(tmp_path, values).layers
    assert isinstance(layers[1].feed_forward, MoE)
    assert layers[1].feed_forward.latent_size == 1024
    assert layers[3].dense.intermediate_size == 1856


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hybrid_override_pattern": "MX*"}, "describe the layers"),
        ({"hybrid_override_pattern": "M*E", "n_routed_experts": None}, "no number of experts"),
        ({"hybrid_override_pattern": "MEM"}, "no layer of attention"),
        ({"n_groups": 7}, "Mamba-2"),
    ],
)
def test_layers_of_nemotron_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {**NEMOTRON3_NANO, **changes})


@pytest.mark.parametrize(
    "changes", [{"mlp_bias": True}, {"sliding_window": 4096}, {"mlp_hidden_act": "silu"}]
)
def test_unsupported_variants_of_nemotron_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError):
        read(tmp_path, {**NEMOTRON3_NANO, **changes})


def test_gguf_files_of_nemotron_have_attention_or_a_feed_forward_part() -> None:
    own = {**GRANITE_HYBRID, "attention.head_count_kv": [0, 2, 0, 0]}
    own["feed_forward_length"] = [0, 0, 64, 0]
    layers = read_gguf_config(metadata("nemotron_h", **own), {"output.weight"}, "file").layers
    assert [type(layer.mixer) for layer in layers] == [Mamba2, Attention, NoMixer, Mamba2]
    own["feed_forward_length"] = [0, 64, 64, 0]
    with pytest.raises(ConfigError, match="both attention and a feed-forward part"):
        read_gguf_config(metadata("nemotron_h", **own), {"output.weight"}, "file")


KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_kimi_linear_has_delta_nets_between_latent_attention(tmp_path: Path) -> None:
    config = read(tmp_path, KIMI_LINEAR)
    attention = [i for i, layer in enumerate(config.layers) if layer.state_shape is None]
    assert attention == [3, 7, 11, 15, 19, 23, 26]
    assert config.layers[0].mixer == KimiDeltaNet(32, 128, 4)
    assert config.layers[3].mixer == MLA(32, 0, 512, 128, 64, 128, 192**-0.5, rope=None)
    assert config.max_seq_len == 1048576
    part = config.layers[1].feed_forward
    assert isinstance(part, MoE)
    assert part.router == Router(256, 8, Scores.SIGMOID, RouterBias.CHOICE, factor=2.446, eps=1e-20)
    assert part.shared == SharedExpert(1024)
    assert config.layers[0].dense.intermediate_size == 9216


@pytest.mark.parametrize(
    "changes", [{"moe_router_activation_func": "softmax"}, {"mla_use_nope": False}]
)
def test_unsupported_variants_of_kimi_linear_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError):
        read(tmp_path, {**KIMI_LINEAR, **changes})
