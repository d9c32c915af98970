"""Tiny models written as GGUF files in the layout of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
)
from gguf.quants import dequantize, quantize
from transformers import GPT2LMHeadModel

from support.tiny_models import VOCAB_SIZE, byte_tokenizer

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "transformer.norm_f": "output_norm",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    **{
        f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_expert", "shared_experts", "shared_mlp")
        for part in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.wg": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "layer_scalar": "layer_output_scale",
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    "shared_mlp.gate_proj": "ffn_gate",
    "shared_mlp.up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{
        f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp"
        for part in ("gate", "up", "down")
    },
    "feed_forward.router": "ffn_gate_inp",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "norm_attn_norm.norm_1": "attn_norm",
    "norm_attn_norm.norm_2": "attn_output_norm",
    "norm_attn_norm.attn.Wqkv": "attn_qkv",
    "norm_attn_norm.attn.out_proj": "attn_output",
    "ffn.router.layer": "ffn_gate_inp",
    "ffn.experts.mlp.w1": "ffn_gate_exps",
    "ffn.experts.mlp.v1": "ffn_up_exps",
    "ffn.experts.mlp.w2": "ffn_down_exps",
}
_PERMUTED = (  # architectures of which the converter interleaves the rows of q and k
    *("llama", "mistral3", "internlm2", "smollm3", "granite", "granitemoe", "minicpm", "arcee"),
)
_LAYER_NORMS = {  # architectures with LayerNorm, and the name of its epsilon in config.json
    "command-r": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "orion": "rms_norm_eps",
    "dbrx": "norm_eps",
    "gpt2": "norm_eps",
    "starcoder": "norm_eps",
}
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}  # Phi-3
_SEED_NORMS = {"post_attention_layernorm": "post_attention_norm"}
_GLM_NORMS = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GEMMA4_NAMES = {
    "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_SCALES = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


_ARCHITECTURES = {  # by `model_type`, where the names differ
    "gemma3_text": "gemma3",
    "ernie4_5_moe": "ernie4_5-moe",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granite",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}


def write_gguf(
    model: Any,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_tensors: dict[str, np.ndarray] | None = None,
    kinds: dict[str, str] | None = None,
    *,
    arch: str | None = None,
    packed: dict[GGMLQuantizationType, dict[str, np.ndarray]] | None = None,
    stacks_experts: bool = True,
) -> Path:
    """Writes matrices as `kind`, or as `kinds` maps parts of a layer, and all else as float32.

    The vocabulary is byte-level. `arch` is the architecture's name in the file, if it is not the
    one of the model's class. `packed` are blocks to write instead of tensors, by type and name.
    Without `stacks_experts` each matrix of an expert is a tensor, as in old files of Mixtral.
    """
    config = _usual_config(model.config)
    arch = arch or _ARCHITECTURES.get(config.model_type, config.model_type)
    if arch == "gemma4":  # its sizes differ by layer
        config.allow_global_per_layer_attribute_access = True
    writer = GGUFWriter(path, arch)
    head_dim = _add_sizes(writer, config, arch)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    base = rope.get("full_attention", rope)["rope_theta"]
    writer.add_rope_freq_base(base * rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2)))
    if rope.get("rope_type") == "longrope":
        extra_tensors = {**(extra_tensors or {}), **_add_longrope(writer, config)}
    _add_choices(writer, config, arch)
    if arch == "gemma4":
        extra_tensors = {**(extra_tensors or {}), **_add_gemma4(writer, model)}
    if arch == "apertus":
        _add_xielu(writer, model)
    add_vocabulary(writer)
    for name, weight in _tensors(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_stored(name, weight, config, arch).numpy()
        stored_name = _gguf_name(name, arch)
        if any(stored_name in blocks for blocks in (packed or {}).values()):
            continue
        own = (kinds or {}).get(stored_name.split(".")[-2], kind.name)
        is_plain = stored_name.endswith(".bias") or "ffn_gate_inp" in stored_name
        is_quantized = values.ndim > 1 and not is_plain
        raw = GGMLQuantizationType[own if is_quantized else "F32"]
        if "_exps." in stored_name and not stacks_experts:
            for index, matrix in enumerate(values):
                own_name = stored_name.replace("_exps", f".{index}")
                writer.add_tensor(own_name, _quantized(matrix, raw), raw_dtype=raw)
            continue
        stored = _quantized(values, raw) if is_quantized else values
        writer.add_tensor(stored_name, stored, raw_dtype=raw)
    for name, extra in (extra_tensors or {}).items():
        writer.add_tensor(name, extra)
    for packed_kind, blocks in (packed or {}).items():
        for name, raw_blocks in blocks.items():
            writer.add_tensor(name, np.ascontiguousarray(raw_blocks), raw_dtype=packed_kind)
    write_file(writer)
    return path


def write_file(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, config: Any, arch: str) -> int:
    """Writes the sizes of layers and heads, and returns that of a head."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    dense_size = getattr(config, "intermediate_size_mlp", config.intermediate_size)
    writer.add_feed_forward_length(dense_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    if arch in _LAYER_NORMS:
        writer.add_layer_norm_eps(getattr(config, _LAYER_NORMS[arch]))
        if arch == "dbrx":
            writer.add_clamp_kqv(config.clip_qkv)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    return int(head_dim)


def _usual_config(config: Any) -> Any:
    """The configuration under the names that most families use."""
    if config.model_type in ("gpt2", "gpt_bigcode"):
        return SimpleNamespace(
            model_type=config.model_type,
            **{key: getattr(config, key) for key in ("hidden_size", "num_hidden_layers")},
            num_attention_heads=config.n_head,
            num_key_value_heads=1 if config.model_type == "gpt_bigcode" else config.n_head,
            max_position_embeddings=config.n_positions,
            intermediate_size=config.n_inner or 4 * config.n_embd,
            rope_parameters={"rope_theta": 10000.0},
            norm_eps=config.layer_norm_epsilon,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    if config.model_type != "dbrx":
        return config
    attention, experts = config.attn_config, config.ffn_config
    return SimpleNamespace(
        **{key: getattr(config, key) for key in ("model_type", "num_hidden_layers", "hidden_size")},
        max_position_embeddings=config.max_seq_len,
        intermediate_size=experts.ffn_hidden_size,
        num_attention_heads=config.n_heads,
        num_key_value_heads=attention.kv_n_heads,
        rope_parameters=config.rope_parameters,
        clip_qkv=attention.clip_qkv,
        norm_eps=1e-5,
        num_experts=experts.moe_num_experts,
        num_experts_per_tok=experts.moe_top_k,
        tie_word_embeddings=False,
    )


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, gate and up of the experts and of Granite 4 apart."""
    for name, stored in model.state_dict().items():
        is_turned = ".feed_forward.experts." in name  # Llama 4
        is_turned |= isinstance(model, GPT2LMHeadModel) and ".c_" in name and stored.dim() > 1
        weight = stored.transpose(-1, -2) if is_turned else stored
        if name.endswith("layer_scalar"):
            yield f"{name}.weight", weight
        elif weight.dim() > 1 and ".experts." in name and model.config.model_type == "gpt_oss":
            yield from _gpt_oss_experts(name, weight)
        elif name.endswith("experts.gate_up_proj") and model.config.model_type != "gemma4_text":
            stem = name.removesuffix("gate_up_proj")
            for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                yield f"{stem}{part}_proj", half
        elif name.endswith("shared_mlp.input_linear.weight"):
            stem = name.removesuffix("input_linear.weight")
            for part, half in zip(("gate", "up"), weight.chunk(2, 0), strict=True):
                yield f"{stem}{part}_proj.weight", half
        elif ".experts.mlp." in name:  # DBRX
            experts = weight.view(model.config.ffn_config.moe_num_experts, -1, weight.shape[1])
            yield name, experts.transpose(1, 2) if name.endswith("w2") else experts
        elif ".act_fn." not in name:  # numbers that are in the metadata
            yield name, weight


def _gpt_oss_experts(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices [experts, in, out] or biases [experts, out], with gate and up in turn, as
    [experts, out, in] and apart."""
    stem, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
    kind = "bias" if is_bias else "weight"
    weight = weight if is_bias else weight.transpose(1, 2)
    if stem.endswith("down_proj"):
        yield f"{stem}.{kind}", weight.contiguous()
        return
    for turn, part in enumerate(("gate", "up")):
        own = stem.replace("gate_up_proj", f"{part}_proj")
        yield f"{own}.{kind}", weight[:, turn::2].contiguous()


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    counts = (getattr(config, name, 0) for name in ("num_local_experts", "num_experts"))
    writer.add_expert_count(next(count for count in counts if count))
    keys = ("num_experts_per_tok", "moe_topk", "top_k_experts")
    used = (getattr(config, name, 0) for name in keys)
    writer.add_expert_used_count(next(count for count in used if count))
    size = getattr(config, "moe_intermediate_size", config.intermediate_size)
    writer.add_expert_feed_forward_length(size)
    for name in ("n_shared_experts", "moe_num_shared_experts"):
        if hasattr(config, name):
            writer.add_expert_shared_count(getattr(config, name))
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if config.model_type == "glm4_moe":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _add_choices(writer: GGUFWriter, config: Any, arch: str) -> None:
    """Writes the settings of a family's own mechanisms."""
    rope = config.rope_parameters
    if "yarn" in (rope.get("rope_type"), rope.get("full_attention", {}).get("rope_type")):
        _add_yarn(writer, rope.get("full_attention", rope))
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if hasattr(config, "residual_multiplier"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if getattr(config, "num_local_experts", getattr(config, "num_experts", 0)):
        _add_experts(writer, config)
    may_have_window = arch in ("phi3", "olmo2", "exaone4", "cohere2", "gpt-oss")
    has_window = may_have_window and getattr(config, "sliding_window", None)
    if arch in ("gemma2", "gemma3") or has_window:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_yarn(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_longrope(writer: GGUFWriter, config: Any) -> dict[str, np.ndarray]:
    """Writes the settings of longrope, and returns its tensors."""
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    factor = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
    return {
        f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], dtype=np.float32)
        for which in ("long", "short")
    }


def _add_gemma4(writer: GGUFWriter, model: Any) -> dict[str, np.ndarray]:
    """Writes the heads and windows of both kinds of layers, and returns the RoPE divisors."""
    config, layers = model.config, [layer.self_attn for layer in model.model.layers]
    is_local = [kind == "sliding_attention" for kind in config.layer_types]
    sizes = {local: layer.head_dim for local, layer in zip(is_local, layers, strict=True)}
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_local)
    writer.add_head_count_kv([layer.k_proj.weight.shape[0] // layer.head_dim for layer in layers])
    writer.add_key_length(sizes[False])
    writer.add_key_length_swa(sizes[True])
    writer.add_rope_dimension_count(sizes[False])
    writer.add_rope_dimension_count_swa(sizes[True])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope = config.rope_parameters["full_attention"]
    rotated = int(sizes[False] * rope["partial_rotary_factor"] / 2)
    divisors = [1.0] * rotated + [1e30] * (sizes[False] // 2 - rotated)
    return {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}


def _add_xielu(writer: GGUFWriter, model: Any) -> None:
    activations = [layer.mlp.act_fn for layer in model.model.layers]
    writer.add_xielu_alpha_p([float(act.alpha_p.detach()) for act in activations])
    writer.add_xielu_alpha_n([float(act.alpha_n.detach()) for act in activations])
    writer.add_xielu_beta([float(act.beta) for act in activations])
    writer.add_xielu_eps([float(act.eps) for act in activations])


def _quantized(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantized blocks of `values`; random blocks of their size for types that the package cannot
    write."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        rows, columns = values.shape
        size = float(dequantize(random_blocks(kind, rows, columns), kind).std())
        return random_blocks(kind, rows, columns, scale=float(values.std()) / size)


def random_blocks(
    kind: GGMLQuantizationType, rows: int, columns: int, scale: float = 1.0
) -> np.ndarray:
    """Random blocks, uint8 [rows, bytes], with float16 scales of both signs in 4 bytes: the first
    ones, or the last ones of types that store their scales there.

    For types with a scale and no minimum, 2 of these bytes are codes. MXFP4 has an exponent instead
    of a scale.
    """
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 256, (rows, columns // block_values, block_bytes), dtype=np.uint8)
    factors = rng.normal(scale=scale, size=(rows, columns // block_values, 2)).astype(np.float16)
    place = slice(-4, None) if kind.name in ("Q2_K", "Q3_K", "Q6_K") else slice(4)
    raw[..., place] = factors.view(np.uint8)
    if kind is GGMLQuantizationType.MXFP4:
        raw[..., 0] = rng.integers(118, 130, raw.shape[:2])
    return raw.reshape(rows, -1)


def add_vocabulary(writer: GGUFWriter) -> None:
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens += ["ab", *(f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal, unused = 3, 1, 5
    writer.add_token_types([control] * 3 + [normal] * 257 + [unused] * (VOCAB_SIZE - 260))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _as_stored(name: str, weight: torch.Tensor, config: Any, arch: str) -> torch.Tensor:
    if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
        return weight.flatten()
    if arch in ("gemma", "gemma2", "gemma3"):
        return weight + 1.0 if "norm" in name else weight
    if arch not in _PERMUTED:
        return weight
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:  # each rotated pair (i, i + D/2) side by side
            split = weight.view(count, 2, config.head_dim // 2, *weight.shape[1:])
            return split.transpose(1, 2).reshape(weight.shape)
    return weight


def _gguf_name(name: str, arch: str) -> str:
    if name.endswith("e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    for part, stored in _SCALES.items():
        if name.endswith(part):
            return f"blk.{name.split('.')[2]}.{stored}.scale"
    has_kind = name.endswith((".weight", ".bias"))
    stem, kind = name.rsplit(".", 1) if has_kind else (name, "weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    norms = {
        **dict.fromkeys(("seed_oss", "glm4moe", "gpt-oss"), _SEED_NORMS),
        "glm4": _GLM_NORMS,
        **dict.fromkeys(("gemma2", "gemma3", "gemma4", "olmo2", "exaone4"), _GEMMA_NORMS),
    }
    names = _PARTS | _FUSED | _GEMMA4_NAMES | norms.get(arch, _LLAMA_NORMS)
    return f"blk.{layer}.{names[part]}.{kind}"
