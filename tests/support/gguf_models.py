"""Tiny models written as GGUF files in the layout of llama.cpp's converter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize

from support.tiny_models import VOCAB_SIZE, byte_tokenizer

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_PERMUTED = (  # architectures of which the converter interleaves the rows of q and k
    *("llama", "mistral3", "internlm2", "smollm3", "granite", "minicpm", "arcee"),
)
_LAYER_NORMS = {  # architectures with LayerNorm, and the name of its epsilon in config.json
    "command-r": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "orion": "rms_norm_eps",
}
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}  # Phi-3
_SEED_NORMS = {"post_attention_layernorm": "post_attention_norm"}
_GLM_NORMS = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    model: Any,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_tensors: dict[str, np.ndarray] | None = None,
    kinds: dict[str, str] | None = None,
    *,
    arch: str | None = None,
) -> Path:
    """Writes matrices as `kind`, or as `kinds` maps parts of a layer, and all else as float32.

    The vocabulary is byte-level. `arch` is the architecture's name in the file, if it is not the
    one of the model's class.
    """
    config = model.config
    names = {"gemma3_text": "gemma3", "mistral": "llama", "ministral3": "mistral3"}
    own_name = {**names, "olmo3": "olmo2"}.get(config.model_type)
    arch = arch or own_name or config.model_type
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    if arch in _LAYER_NORMS:
        writer.add_layer_norm_eps(getattr(config, _LAYER_NORMS[arch]))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    base = rope.get("full_attention", rope)["rope_theta"]
    writer.add_rope_freq_base(base * rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2)))
    if rope.get("rope_type") == "longrope":
        extra_tensors = {**(extra_tensors or {}), **_add_longrope(writer, config)}
    _add_choices(writer, config, arch)
    _add_vocabulary(writer)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_stored(name, weight, config, arch).numpy()
        stored_name = _gguf_name(name, arch)
        own = (kinds or {}).get(stored_name.split(".")[-2], kind.name)
        raw = GGMLQuantizationType[own if values.ndim == 2 else "F32"]
        stored = _quantized(values, raw) if values.ndim == 2 else values
        writer.add_tensor(stored_name, stored, raw_dtype=raw)
    for name, extra in (extra_tensors or {}).items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    may_have_window = arch in ("phi3", "olmo2", "exaone4", "cohere2")
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


def _quantized(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantized blocks of `values`; random blocks for types that the package cannot write."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind, *values.shape)


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Random blocks, uint8 [rows, bytes], with float16 scales of both signs in the first 4 bytes.

    For types with a scale and no minimum, the second 2 of these bytes are codes.
    """
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 256, (rows, columns // block_values, block_bytes), dtype=np.uint8)
    factors = rng.normal(size=(rows, columns // block_values, 2)).astype(np.float16)
    raw[..., :4] = factors.view(np.uint8)
    return raw.reshape(rows, -1)


def _add_vocabulary(writer: GGUFWriter) -> None:
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
    if arch.startswith("gemma"):
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
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    norms = {
        "seed_oss": _SEED_NORMS,
        "glm4": _GLM_NORMS,
        **dict.fromkeys(("gemma2", "gemma3", "olmo2", "exaone4"), _GEMMA_NORMS),
    }
    names = _PARTS | _FUSED | norms.get(arch, _LLAMA_NORMS)
    return f"blk.{layer}.{names[part]}.{kind}"
