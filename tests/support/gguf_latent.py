"""Tiny models with latent attention written as GGUF files in the layout of llama.cpp's converter.

Older files have the matrix from latent vectors to keys and values as one tensor, and the sizes of
the heads under the usual keys. Later files have two tensors, that of keys transposed for each head,
and the usual keys are those of a cached row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from torch import Tensor

from support.gguf_models import add_vocabulary, write_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    **{
        f"mlp.{owner}{part}_proj": f"ffn_{part}{ending}"
        for owner, ending in (("", ""), ("shared_experts.", "_shexp"), ("experts.", "_exps"))
        for part in ("gate", "up", "down")
    },
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_latent(
    model: Any,
    path: Path,
    *,
    arch: str = "deepseek2",
    is_split: bool = True,
    gating: ExpertGatingFuncType | None = ExpertGatingFuncType.SIGMOID,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Writes the matrices as `kind` and all else as float32. `is_split`: in the later layout.
    `gating`: scores of the experts that the metadata of other models than DeepSeek V2 name."""
    config, writer = model.config, GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_heads(writer, config, is_split=is_split)
    _add_rope(writer, config.rope_parameters)
    _add_experts(writer, config, gating)
    add_vocabulary(writer)
    for name, weight in _stored(model, is_split=is_split):
        is_matrix = weight.dim() > 1 and "ffn_gate_inp" not in name
        raw = kind if is_matrix else GGMLQuantizationType.F32
        values = weight.contiguous().numpy()
        writer.add_tensor(name, quantize(values, raw), raw_dtype=raw)
    write_file(writer)
    return path


def _add_heads(writer: GGUFWriter, config: Any, *, is_split: bool) -> None:
    key, rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if is_split:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + config.qk_rope_head_dim)
        writer.add_value_length(rank)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(key)
        writer.add_value_length(config.v_head_dim)


def _add_rope(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_experts(writer: GGUFWriter, config: Any, gating: ExpertGatingFuncType | None) -> None:
    dense = getattr(config, "first_k_dense_replace", 1)
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if config.model_type in ("deepseek_v2", "mistral4"):
        gating = ExpertGatingFuncType.SOFTMAX
    if config.norm_topk_prob and config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(True)
    if gating is not None:
        writer.add_expert_gating_func(gating)


def _stored(model: Any, *, is_split: bool) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    for name, weight in model.state_dict().items():
        if name in _TOP:
            yield _TOP[name], weight
            continue
        _, _, layer, part = name.split(".", 3)
        suffix = "bias" if part.endswith(".bias") else "weight"
        stem = part.removesuffix(f".{suffix}")
        prefix = f"blk.{layer}."
        if part == "mlp.gate.e_score_correction_bias":
            yield f"{prefix}exp_probs_b.bias", weight
        elif stem == "mlp.experts.gate_up_proj" and config.model_type == "mistral4":
            yield f"{prefix}ffn_gate_up_exps.weight", weight
        elif stem == "mlp.experts.gate_up_proj":
            for half, values in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                yield f"{prefix}ffn_{half}_exps.weight", values
        elif stem == "self_attn.kv_b_proj" and is_split:
            heads = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            yield f"{prefix}attn_k_b.weight", keys.transpose(1, 2)
            yield f"{prefix}attn_v_b.weight", values
        else:
            yield f"{prefix}{_NAMES[stem]}.{suffix}", weight


def with_quantized_weights(model: Any, kind: GGMLQuantizationType, *, is_split: bool) -> Any:
    """The same model with the values that a file of `kind` has."""

    def rounded(x: Tensor) -> Tensor:
        return torch.from_numpy(dequantize(quantize(x.contiguous().numpy(), kind), kind))

    config = model.config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or name.endswith("mlp.gate.weight"):
                continue
            if is_split and "kv_b_proj" in name:
                heads = parameter.view(config.num_attention_heads, -1, config.kv_lora_rank)
                keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
                parts = rounded(keys.transpose(1, 2)).transpose(1, 2), rounded(values)
                parameter.copy_(torch.cat(parts, 1).view(parameter.shape))
            else:
                parameter.copy_(rounded(parameter))
    return model
