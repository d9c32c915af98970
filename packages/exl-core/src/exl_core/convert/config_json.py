"""Content of a `config.json` for a model that was read from a GGUF file.

Keys are those that `arch/hf_config.py` reads for the family. `side_files.check` reads the result
back and refuses any difference, so that a number without a key here is an error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from struct import pack, unpack

from exl_core.arch.experts import LAYER_KINDS
from exl_core.arch.hf_config import ACTIVATIONS, LAYER_TYPES, ROPE_METHODS
from exl_core.arch.layers import Attention, Dense, LayerSpec, MoE
from exl_core.arch.spec import ArchSpec, ModelConfig, NoRope, RopeConfig, RopeMethod, Window
from exl_core.errors import UnsupportedModelError

MODEL_TYPES = {
    "ernie4_5-moe": "ernie4_5_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4moe": "glm4_moe",
    "granite4": "granitemoehybrid",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "minimax-m2": "minimax_m2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "seed-oss": "seed_oss",
}
"""`model_type` of families whose name here is another one."""


def hf_config(config: ModelConfig, where: Path) -> dict[str, object]:
    """Content of a `config.json` for `config`. Raises UnsupportedModelError for layers or RoPE that
    it cannot state."""
    arch, layers = config.arch, config.layers
    _check_family(config, where)
    local = next((one for one in layers if one.attention.window), layers[0])
    wide = next((one for one in layers if not one.attention.window), local)
    dense = next((one.dense for one in layers if isinstance(one.feed_forward, Dense)), None)
    experts = next((p for one in layers if isinstance(p := one.feed_forward, MoE)), None)
    mlp = dense or experts
    assert mlp is not None, "other parts cannot be converted"
    if dense is not None and dense.activation_numbers is not None:
        raise UnsupportedModelError(
            "the activation's numbers are in the metadata of this GGUF file",
            where=where,
            next_step="Start from the model's safetensors files, which have tensors of them.",
        )
    _check_layers(config, (local, wide), where)
    attention = local.attention
    written: dict[str, object] = {
        "architectures": [arch.hf_names[0]],
        "model_type": MODEL_TYPES.get(arch.name, arch.name),
        "torch_dtype": "float16",
        "hidden_size": config.hidden_size,
        arch.intermediate_size_key: _dense_width(mlp),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_q_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        arch.norm_eps_keys[0]: config.norm_eps,
        arch.bias_key: attention.has_qkv_bias,
        "attention_out_bias": attention.has_output_bias,
        arch.mlp_bias_key: dense is not None and dense.has_bias,
        "tie_word_embeddings": config.has_tied_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": config.pad_id,
        **_ropes(config, where),
        **_scales(config, attention),
        **_by_layer(config),
        **_required(arch, config.num_layers),
        **({} if experts is None else _experts(config, experts)),
    }
    names = [name for name, kind in ACTIVATIONS.items() if kind is mlp.activation]
    activation = next(iter((*names, *arch.activation_aliases)))
    written |= dict.fromkeys(("hidden_act", "hidden_activation"), activation)
    if arch.global_head_dim_default is not None:
        written |= _global_heads(wide.attention)
        written |= {"enable_moe_block": experts is not None}
    if attention.head_norm is not arch.head_norm:
        written["use_qk_norm"] = True
    if config.has_normalized_head:
        written["norm_head"] = 1
    found = {key: value for key, value in written.items() if value is not None}
    return found | _nulls(config, attention)


def _check_family(config: ModelConfig, where: Path) -> None:
    """Refuses families with keys in nested objects, and layers without keys and values."""
    has_other_keys = any("." in key for _, key in config.arch.renamed_keys)
    if has_other_keys or any(not isinstance(one.mixer, Attention) for one in config.layers):
        raise UnsupportedModelError(
            f"config.json of {config.arch.name} models cannot be made from a GGUF file",
            where=where,
            next_step="Start from the model's safetensors files.",
        )


def _check_layers(config: ModelConfig, kinds: tuple[LayerSpec, LayerSpec], where: Path) -> None:
    """Refuses layers that differ in more than their window and RoPE, and whether they have
    experts."""
    parts = {isinstance(one.feed_forward, MoE): one.feed_forward for one in reversed(config.layers)}
    if config.arch.global_head_dim_default is None:
        kinds = kinds[0], kinds[0]
    known = [
        replace(_without_window(layer), feed_forward=part)
        for layer in kinds
        for part in parts.values()
    ]
    if any(_without_window(layer) not in known for layer in config.layers):
        raise UnsupportedModelError(
            "the layers of this GGUF file differ in ways that config.json cannot state",
            where=where,
            next_step="Start from the model's safetensors files.",
        )


def _without_window(layer: LayerSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, window=0, rope=0))


def _scales(config: ModelConfig, attention: Attention) -> dict[str, object]:
    """Factors and caps of scores, states and logits."""
    arch, multipliers = config.arch, config.multipliers
    found: dict[str, object] = {
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    if arch.logit_scale_default is not None:
        found["logit_scale"] = multipliers.logits
    elif arch.has_multipliers:
        found["embedding_multiplier"] = multipliers.embedding
        found["residual_multiplier"] = multipliers.residual
        found["logits_scaling"] = _as_float32(1.0 / multipliers.logits)
        found["attention_multiplier"] = attention.scale
    is_usual = math.isclose(attention.scale, attention.head_dim**-0.5, rel_tol=1e-12)
    if not arch.has_multipliers and arch.attention_scale is None and not is_usual:
        found["query_pre_attn_scalar"] = _as_float32(attention.scale**-2)
    return found


def _dense_width(part: Dense | MoE) -> int:
    """Width of the MLP that every token passes; of the experts if there is none beside them."""
    if isinstance(part, MoE) and part.is_beside_shared:
        return part.inner_size
    return part.intermediate_size


def _experts(config: ModelConfig, part: MoE) -> dict[str, object]:
    """Experts, their router, and the layers that have them."""
    form, router = config.arch.experts, part.router
    assert form is not None, "the family has experts"
    found: dict[str, object] = {
        form.num_experts_keys[0]: router.num_experts,
        form.top_k_key: router.top_k,
        form.size_key: part.intermediate_size,
    }
    if form.normalizes is None:
        found["norm_topk_prob"] = router.normalizes
    if form.factor_default is not None:
        found["routed_scaling_factor"] = router.factor
    if form.has_groups:
        found |= {"n_group": router.groups, "topk_group": router.kept_groups}
    shared = 0 if part.shared is None else part.shared.intermediate_size
    if form.shared_size_key is not None:
        found[form.shared_size_key] = shared
    elif form.shared_count_key is not None:
        found[form.shared_count_key] = shared // part.intermediate_size
    is_sparse = [isinstance(layer.feed_forward, MoE) for layer in config.layers]
    if not all(is_sparse) or form.first_sparse_default:
        names = {value: name for name, value in LAYER_KINDS.items()}
        found["mlp_layer_types"] = [names[one] for one in is_sparse]
    return found


def _as_float32(value: float) -> float:
    """The nearest float32: what the file of which `value` is the inverse has stored."""
    nearest: float = unpack("f", pack("f", value))[0]
    return nearest


def _by_layer(config: ModelConfig) -> dict[str, object]:
    """Windows, and layers without RoPE."""
    found: dict[str, object] = {}
    windows = [layer.attention.window for layer in config.layers]
    names = {window: name for name, window in LAYER_TYPES.items()}
    if any(windows):
        found["sliding_window"] = max(windows)
        kinds = [Window.LOCAL if window else Window.GLOBAL for window in windows]
        found["layer_types"] = [names[kind] for kind in kinds]
    if config.arch.no_rope is NoRope.INTERVAL:
        is_rotated = [layer.attention.rope is not None for layer in config.layers]
        found["no_rope_layers"] = list(map(int, is_rotated))
    return found


def _nulls(config: ModelConfig, attention: Attention) -> dict[str, None]:
    """Keys that say that the model lacks what the family has by default."""
    arch = config.arch
    has_window = any(layer.attention.window for layer in config.layers)
    found = {
        "sliding_window": arch.sliding_window_default is not None and not has_window,
        "attn_logit_softcapping": arch.attention_softcap_default is not None
        and attention.softcap is None,
        "final_logit_softcapping": arch.final_softcap_default is not None
        and config.final_softcap is None,
    }
    return {key: None for key, is_missing in found.items() if is_missing}


def _required(arch: ArchSpec, num_layers: int) -> dict[str, object]:
    """Keys with the only values that the family supports."""
    found: dict[str, object] = {key: values[0] for key, values in arch.required}
    if "layer_types" in found:
        found["layer_types"] = [found["layer_types"]] * num_layers
    return found


def _global_heads(attention: Attention) -> dict[str, object]:
    """Heads of the layers without a window, where they differ from the others'."""
    return {
        "global_head_dim": attention.head_dim,
        "num_global_key_value_heads": attention.num_kv_heads,
        "attention_k_eq_v": attention.is_value_key,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }


def _ropes(config: ModelConfig, where: Path) -> dict[str, object]:
    """RoPE tables. Layers with positions' factors on queries have their settings there too."""
    rope, heads = config.ropes[0], config.layers[0].attention
    temperature = heads.temperature
    scaling = _scaling(rope, where)
    if rope.method is RopeMethod.PROPORTIONAL:
        local = {"rope_type": "default", "rope_theta": config.ropes[1].base}
        whole = {**scaling, "rope_theta": rope.base}
        return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    found: dict[str, object] = {"rope_theta": rope.base}
    if len(config.ropes) > 1:
        found["rope_local_base_freq"] = config.ropes[1].base
    if rope.rotary_dim != int(heads.head_dim * config.arch.partial_rotary_default):
        found["partial_rotary_factor"] = rope.rotary_dim / heads.head_dim
    if temperature is not None:
        return found | {
            "rope_parameters": {
                **scaling,
                "rope_theta": rope.base,
                "llama_4_scaling_beta": temperature.beta,
                "original_max_position_embeddings": temperature.length,
            }
        }
    return found | ({"rope_scaling": scaling} if len(scaling) > 1 else {})


def _scaling(rope: RopeConfig, where: Path) -> dict[str, object]:
    """Method of a RoPE table, and its numbers."""
    name = next(name for name, method in ROPE_METHODS.items() if method is rope.method)
    found: dict[str, object] = {"rope_type": name}
    original = {"original_max_position_embeddings": rope.original_max_seq_len}
    match rope.method:
        case RopeMethod.DEFAULT if not rope.frequency_divisors:
            return found
        case RopeMethod.LINEAR if not rope.frequency_divisors:
            return found | {"factor": rope.factor}
        case RopeMethod.PROPORTIONAL:
            return found | {"partial_rotary_factor": 2 * rope.rotated_pairs / rope.rotary_dim}
        case RopeMethod.LONGROPE:
            lists = {
                "short_factor": list(rope.frequency_divisors),
                "long_factor": list(rope.long_divisors),
            }
            return found | original | lists | {"attention_factor": rope.attention_factor}
        case RopeMethod.YARN if not rope.frequency_divisors:
            betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
            more = {"attention_factor": rope.attention_factor, "truncate": rope.truncate}
            return found | original | betas | more | {"factor": rope.factor}
    raise UnsupportedModelError(
        "the RoPE scaling of this GGUF file has no counterpart in config.json",
        where=where,
        next_step="Start from the model's safetensors files.",
    )
