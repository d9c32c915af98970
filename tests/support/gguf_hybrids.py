"""Tiny hybrids written as GGUF files in the layout of llama.cpp's converter.

It splits the fused projections of Qwen3-Next by kind, stores the decay as -exp(A_log), adds the one
to the norms of Qwen's models, and orders the value heads of Qwen3.5 by their place within a key
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGUFWriter
from torch import Tensor

from support.gguf_models import add_vocabulary, write_file

_COMMON = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
}
_LFM2 = {
    **_COMMON,
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
}
_QWEN = {
    **_COMMON,
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    **{
        f"mlp.{shared}{part}_proj.weight": f"ffn_{part}{ending}.weight"
        for shared, ending in (("", ""), ("shared_expert.", "_shexp"))
        for part in ("gate", "up", "down")
    },
}
_LFM2_MOE = {
    **_LFM2,
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
}
_GRANITE = {
    **_COMMON,
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.norm.weight": "ssm_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}
_NEMOTRON = {
    "norm.weight": "attn_norm.weight",
    **{f"mixer.{part}_proj.weight": f"attn_{part}.weight" for part in ("q", "k", "v")},
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
}
_TOP = {
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_hybrid(model: Any, path: Path, arch: str) -> Path:
    """Writes all tensors as float32. `arch`: lfm2, lfm2moe, granitehybrid, nemotron_h,
    nemotron_h_moe, qwen35, qwen35moe or qwen3next."""
    config, writer = model.config, GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if not arch.startswith("nemotron_h"):
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch in ("lfm2", "lfm2moe"):
        _add_heads(writer, config)
        writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_key_length(config.head_dim)
        if arch == "lfm2moe":
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    elif arch == "granitehybrid":
        _add_granite(writer, config)
    elif arch.startswith("nemotron_h"):
        _add_nemotron(writer, config, arch)
    else:
        _add_delta_net(writer, config)
    add_vocabulary(writer)
    for name, weight in _stored(model, arch):
        if name != "output.weight" or not config.tie_word_embeddings:
            writer.add_tensor(name, weight.contiguous().numpy())
    write_file(writer)
    return path


def _add_heads(writer: GGUFWriter, config: Any) -> None:
    kinds = config.layer_types
    writer.add_head_count_kv(
        [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]
    )


def _add_granite(writer: GGUFWriter, config: Any) -> None:
    _add_heads(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)


def _add_nemotron(writer: GGUFWriter, config: Any, arch: str) -> None:
    _add_heads(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_scaling_finetuned(False)
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    writer.add_feed_forward_length([widths.get(kind, 0) for kind in config.layer_types])
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    if arch == "nemotron_h_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)


def _add_delta_net(writer: GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * 0.25))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    interval = config.layer_types.index("full_attention") + 1
    writer.add_uint32(f"{writer.arch}.full_attention_interval", interval)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _stored(model: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    names = {
        **{"lfm2": _LFM2, "lfm2moe": _LFM2_MOE, "granitehybrid": _GRANITE},
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
    }.get(arch, _QWEN)
    is_qwen = names is _QWEN
    for name, weight in model.state_dict().items():
        if name in _TOP:
            is_norm = is_qwen and name.endswith("norm.weight")
            yield _TOP[name], weight + 1 if is_norm else weight
            continue
        _, _, layer, part = name.split(".", 3)
        prefix = f"blk.{layer}."
        if is_qwen:
            for own, values in _qwen_parts(model.config, arch, part, weight):
                yield prefix + (names.get(own) or own), values
        elif part.endswith(("gate_up_proj", "input_linear.weight")):
            ending = (
                "_exps" if "experts" in part else "_shexp" * bool(model.config.num_local_experts)
            )
            for half, values in zip(("gate", "up"), weight.chunk(2, -2), strict=True):
                yield f"{prefix}ffn_{half}{ending}.weight", values
        elif part == "shared_mlp.output_linear.weight":
            ending = "_shexp" * bool(model.config.num_local_experts)
            yield f"{prefix}ffn_down{ending}.weight", weight
        else:
            values = weight.squeeze(1) if "conv" in part and weight.dim() > 2 else weight
            yield prefix + names[part], _as_mamba2(model.config, arch, part, values)


def _as_mamba2(config: Any, arch: str, part: str, weight: Tensor) -> Tensor:
    """The values as files of Mamba-2 have them. Rows of queries and keys are interleaved."""
    if part.endswith(".A_log"):
        return -torch.exp(weight).unsqueeze(1)
    if part.endswith(".D"):
        return weight.unsqueeze(1)
    if part in ("mamba.norm.weight", "mixer.norm.weight"):
        groups = config.mamba_n_groups if arch == "granitehybrid" else config.n_groups
        return weight.view(groups, -1)
    if arch == "granitehybrid" and part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        is_query = part == "self_attn.q_proj.weight"
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight


def _qwen_parts(config: Any, arch: str, part: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    shared = values // keys
    sizes = [key_dim, key_dim, shared * value_dim, shared * value_dim]

    def tiled(x: Tensor, each: int) -> Tensor:
        """Rows of value heads, each of `each`, in the order of Qwen3.5's files."""
        if arch == "qwen3next":
            return x
        heads = x.view(keys, shared, each, *x.shape[1:])
        return heads.transpose(0, 1).reshape(x.shape)

    match part:
        case "linear_attn.in_proj_qkvz.weight":
            groups = weight.view(keys, sum(sizes), -1).split(sizes, 1)
            q, k, v, z = (x.reshape(-1, weight.shape[1]) for x in groups)
            yield "attn_qkv.weight", torch.cat([q, k, v])
            yield "attn_gate.weight", z
        case "linear_attn.in_proj_qkv.weight" | "linear_attn.conv1d.weight":
            before = 2 * keys * key_dim
            flat = weight.squeeze(1) if weight.dim() > 2 else weight
            yield part, torch.cat([flat[:before], tiled(flat[before:], value_dim)])
        case "linear_attn.in_proj_z.weight":
            yield part, tiled(weight, value_dim)
        case "linear_attn.in_proj_b.weight" | "linear_attn.in_proj_a.weight":
            yield part, tiled(weight, 1)
        case "linear_attn.dt_bias":
            yield part, tiled(weight, 1)
        case "linear_attn.A_log":
            yield part, -torch.exp(tiled(weight, 1))
        case "linear_attn.out_proj.weight":
            yield part, tiled(weight.T, value_dim).T
        case "mlp.experts.gate_up_proj":
            gate, up = weight.chunk(2, 1)
            yield "ffn_gate_exps.weight", gate
            yield "ffn_up_exps.weight", up
        case _ if part.endswith("norm.weight") and part != "linear_attn.norm.weight":
            yield part, weight + 1
        case _:
            yield part, weight
