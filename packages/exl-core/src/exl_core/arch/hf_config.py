"""Reads a `ModelConfig` from the `config.json` of a checkpoint.

Knows the key names of the hub's configurations, old and new (`rope_scaling` and `rope_parameters`,
`sliding_window_pattern` and `layer_types`). Knows nothing of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from exl_core.arch.blocks import Block, as_blocks, hf_blocks
from exl_core.arch.checks import check_config
from exl_core.arch.experts import hf_experts
from exl_core.arch.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    Fields,
)
from exl_core.arch.latent import ROPE_DIM_KEY, hf_latent
from exl_core.arch.layers import Activation, HeadNorm, QueryTemperature
from exl_core.arch.recurrent import hf_recurrent, rounded_intermediate_size
from exl_core.arch.registry import find_by_hf_name
from exl_core.arch.rope import longrope_magnitude, ntk_base, yarn_magnitude
from exl_core.arch.spec import (
    ArchSpec,
    LayerNumbers,
    ModelConfig,
    Multipliers,
    NoRope,
    RopeConfig,
    RopeMethod,
    Window,
    with_windows,
    without_rope,
)
from exl_core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from exl_core.files import is_present, read_json_object

ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
    "xielu": Activation.XIELU,
}
NO_ROPE_INTERVAL = 4
PER_LAYER_INPUT_DEFAULT = 256  # Gemma 4's, for configurations that omit it
LAYER_TYPES = {"sliding_attention": Window.LOCAL, "full_attention": Window.GLOBAL}
ROPE_METHODS = {
    "default": RopeMethod.DEFAULT,
    "linear": RopeMethod.LINEAR,
    "llama3": RopeMethod.LLAMA3,
    "yarn": RopeMethod.YARN,
    "longrope": RopeMethod.LONGROPE,
    "su": RopeMethod.LONGROPE,  # name of longrope in older files
    "mrope": RopeMethod.DEFAULT,  # positions of text tokens are the same in all three sections
    # Up to the model's own context, dynamic NTK scaling without 'alpha' leaves RoPE as it is.
    "dynamic": RopeMethod.DEFAULT,
    "proportional": RopeMethod.PROPORTIONAL,
}


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`, checked for consistency."""
    path = directory / "config.json"
    if not is_present(path, ConfigError):
        raise ModelNotFoundError(
            "directory holds no config.json", where=directory, next_step=directory_advice(directory)
        )
    top = Fields(read_json_object(path, ConfigError), path)
    arch = _architecture(top)
    text = top.nested("text_config") if top.has("text_config") else top
    text = _with_usual_keys(arch, text)
    config = _model_config(arch, top, text)
    generation = directory / "generation_config.json"
    if is_present(generation, ConfigError):
        extra = Fields(read_json_object(generation, ConfigError), generation).token_ids(
            "eos_token_id"
        )
        config = replace(config, eos_ids=tuple(dict.fromkeys((*config.eos_ids, *extra))))
    check_config(config, path)
    return config


def directory_advice(directory: Path) -> str:
    """Advice for an error about a directory that is not a model."""
    if any(directory.glob("*.gguf")):
        return "It has GGUF files: name one of them instead of the directory."
    return "A model directory has config.json, weights (*.safetensors) and a tokenizer."


def _architecture(top: Fields) -> ArchSpec:
    names = top.strings("architectures")
    if len(names) != 1:
        raise ConfigError(
            "'architectures' must have one entry", where=top.where, got=", ".join(names) or "none"
        )
    text = top.nested("text_config") if top.has("text_config") else Fields({}, top.where)
    text_type = text.text("model_type") if text.has("model_type") else None
    return find_by_hf_name(names[0], where=top.where, text_type=text_type)


def _model_config(arch: ArchSpec, top: Fields, text: Fields) -> ModelConfig:
    hidden_size = text.integer("hidden_size", arch.hidden_size_default, high=MAX_HIDDEN_SIZE)
    heads = text.integer("num_attention_heads", arch.num_q_heads_default, high=MAX_HEADS)
    head_dim = _head_dim(arch, text, hidden_size // heads)
    layers = _num_layers(arch, text)
    if text.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError("bidirectional attention is not supported", where=text.where)
    _check_activation(arch, text)
    has_bias = arch.has_qkv_bias or text.flag(arch.bias_key, arch.has_bias_default)
    window = _sliding_window(arch, text)
    windows = _checked_windows(arch, text, layers, window)
    _refuse_unknown_inputs(arch, text)
    ropes = _ropes(arch, text, head_dim)
    numbers = LayerNumbers(
        num_q_heads=heads,
        num_kv_heads=text.integer(
            "num_key_value_heads", arch.num_kv_heads_default or heads, high=MAX_HEADS
        ),
        head_dim=head_dim,
        scale=_scale(arch, text, head_dim),
        rope=0,
        window=0,
        softcap=_softcap(text, "attn_logit_softcapping", arch.attention_softcap_default),
        has_qkv_bias=has_bias,
        has_output_bias=text.flag("attention_out_bias", has_bias and not arch.has_qkv_bias),
        intermediate_size=_intermediate_size(arch, text, hidden_size),
        has_mlp_bias=text.flag(arch.mlp_bias_key, arch.has_bias_default),
        temperature=_temperature(arch, text),
        head_norm=_head_norm(arch, text),
        clip=text.optional_number("clip_qkv") if arch.has_qkv_clip else None,
        chunk=_chunk(arch, text),
    )
    numbers = replace(numbers, latent=hf_latent(arch, text, ropes[0], numbers.temperature))
    of_layers = _numbers_by_layer(arch, text, numbers, windows)
    by_layer = with_windows(of_layers, windows, window, len(ropes))
    ids = text if text.has("eos_token_id") else top
    return ModelConfig(
        arch=arch,
        layers=arch.layers(without_rope(by_layer, _is_rotated(arch, text, windows))),
        ropes=ropes,
        hidden_size=hidden_size,
        vocab_size=text.integer("vocab_size", arch.vocab_size_default, high=MAX_VOCAB_SIZE),
        max_seq_len=_context(arch, text),
        norm_eps=_norm_eps(arch, text),
        final_softcap=_softcap(text, "final_logit_softcapping", arch.final_softcap_default),
        has_tied_embeddings=_tied(arch, top, text),
        bos_id=ids.first_token_id("bos_token_id"),
        eos_ids=ids.token_ids("eos_token_id"),
        pad_id=ids.first_token_id("pad_token_id"),
        multipliers=_multipliers(arch, text, hidden_size, layers),
        has_normalized_head=arch.may_normalize_head and text.integer("norm_head", 0, low=0) != 0,
        num_positions=_context(arch, text) if arch.no_rope is NoRope.ALL else 0,
    )


def _num_layers(arch: ArchSpec, text: Fields) -> int:
    if arch.has_single_parts:
        return len(hf_blocks(text))
    return text.integer("num_hidden_layers", arch.num_layers_default, high=MAX_LAYERS)


def _head_dim(arch: ArchSpec, text: Fields, default: int) -> int:
    """Elements of a head; of the rotated part of a head with latent attention."""
    if arch.has_latent:
        return text.integer(ROPE_DIM_KEY, high=MAX_HEAD_DIM)
    return text.integer("head_dim", arch.head_dim_default or default, high=MAX_HEAD_DIM)


def _intermediate_size(arch: ArchSpec, text: Fields, hidden_size: int) -> int:
    default, ratio = arch.intermediate_size_default, arch.intermediate_ratio
    if ratio is not None:
        default = ratio * hidden_size
    size = text.integer(arch.intermediate_size_key, default, high=MAX_INTERMEDIATE_SIZE)
    return rounded_intermediate_size(text, size) if arch.has_rounded_intermediate_size else size


def _with_usual_keys(arch: ArchSpec, text: Fields) -> Fields:
    """The same values, with those that the family has under other keys."""
    found = dict(text.values)
    for usual, own in arch.renamed_keys:
        *sections, key = own.split(".")
        holder: Fields | None = text
        for section in sections:
            holder = holder.nested(section) if holder is not None and holder.has(section) else None
        if holder is not None and key in holder.values:
            found[usual] = holder.values[key]
    return Fields(found, text.where)


def _scale(arch: ArchSpec, text: Fields, head_dim: int) -> float:
    """Factor of the scores."""
    if arch.attention_scale is not None:
        return arch.attention_scale
    if arch.has_multipliers and text.has("attention_multiplier"):
        return text.number("attention_multiplier")
    return math.pow(text.number("query_pre_attn_scalar", float(head_dim)), -0.5)


def _multipliers(arch: ArchSpec, text: Fields, hidden_size: int, layers: int) -> Multipliers:
    """Multipliers under Granite's, MiniCPM's or Cohere's names."""
    if arch.logit_scale_default is not None:
        return Multipliers(logits=text.number("logit_scale", arch.logit_scale_default))
    if not arch.has_multipliers:
        return Multipliers()
    depth = text.optional_number("scale_depth")
    width = text.optional_number("dim_model_base")
    return Multipliers(
        embedding=text.number("embedding_multiplier", text.number("scale_emb", 1.0)),
        residual=text.number(
            "residual_multiplier", 1.0 if depth is None else depth / math.sqrt(layers)
        ),
        logits=(1.0 if width is None else width / hidden_size) / text.number("logits_scaling", 1.0),
    )


def _context(arch: ArchSpec, text: Fields) -> int:
    length = text.integer("max_position_embeddings", 2048)
    return (
        length if arch.context_key is None else max(length, text.integer(arch.context_key, length))
    )


def _norm_eps(arch: ArchSpec, text: Fields) -> float:
    found = (text.number(key) for key in arch.norm_eps_keys if text.has(key))
    return next(found, arch.norm_eps_default)


def _head_norm(arch: ArchSpec, text: Fields) -> HeadNorm | None:
    has_norm = text.flag("use_qk_norm", arch.has_head_norm_default)
    return arch.optional_head_norm if has_norm else None


def _chunk(arch: ArchSpec, text: Fields) -> int:
    """Positions of a chunk of attention; 0 if there are no chunks."""
    key = "attention_chunk_size"
    if arch.chunk_default is None or (key in text.values and not text.has(key)):
        return 0
    return text.integer(key, arch.chunk_default)


def _refuse_unknown_inputs(arch: ArchSpec, text: Fields) -> None:
    """Refuses variants of a family that need more than decoder layers."""
    for key, values in arch.required:
        found = text.values.get(key)
        if any(item not in values for item in (found if isinstance(found, list) else [found])):
            raise UnsupportedModelError(
                f"{arch.name} models with this {key!r} are not supported",
                where=text.where,
                expected=" or ".join(map(repr, values)),
                got=repr(found)[:80],
            )
    if arch.global_head_dim_default is None:
        return
    per_layer = text.integer("hidden_size_per_layer_input", PER_LAYER_INPUT_DEFAULT, low=0)
    shared = text.integer("num_kv_shared_layers", 0, low=0)
    for what, is_there in (
        ("embeddings of their own for each layer (E2B, E4B)", per_layer > 0),
        ("layers that share keys and values (E2B, E4B)", shared > 0),
    ):
        if is_there:
            raise UnsupportedModelError(
                f"{arch.name} models with {what} are not supported",
                where=text.where,
                next_step="12B, 26B-A4B and 31B are.",
            )


def _numbers_by_layer(
    arch: ArchSpec, text: Fields, numbers: LayerNumbers, windows: Sequence[Window]
) -> list[LayerNumbers]:
    experts = hf_experts(arch, text, len(windows))
    recurrent = hf_recurrent(arch, text, len(windows))
    found = [
        replace(_numbers_of(arch, text, numbers, one), experts=part, recurrent=mixer)
        for one, part, mixer in zip(windows, experts, recurrent, strict=True)
    ]
    if not arch.has_single_parts:
        return found
    blocks = hf_blocks(text)
    _check_blocks(text, blocks, has_experts=experts[0] is not None)
    return as_blocks(found, blocks)


def _check_blocks(text: Fields, blocks: Sequence[Block], *, has_experts: bool) -> None:
    if Block.EXPERTS in blocks and not has_experts:
        raise ConfigError(
            "the model has layers with experts, but no number of experts", where=text.where
        )


def _numbers_of(
    arch: ArchSpec, text: Fields, numbers: LayerNumbers, window: Window
) -> LayerNumbers:
    """Numbers of a layer with this window. GLOBAL layers may have heads of another size."""
    if arch.global_head_dim_default is None or window is Window.LOCAL:
        return numbers
    is_value_key = text.flag("attention_k_eq_v", False)
    heads = numbers.num_kv_heads
    if is_value_key:
        heads = _global_number(text, "num_key_value_heads", "num_global_key_value_heads", heads)
    return replace(
        numbers,
        head_dim=_global_head_dim(arch, text, numbers.head_dim),
        num_kv_heads=heads,
        is_value_key=is_value_key,
    )


def _global_head_dim(arch: ArchSpec, text: Fields, head_dim: int) -> int:
    default = arch.global_head_dim_default
    if default is None:
        return head_dim
    return _global_number(text, "head_dim", "global_head_dim", default)


def _global_number(text: Fields, key: str, name: str, default: int) -> int:
    """A number of the GLOBAL layers: `name`, or `key` of the layers in `per_layer_config`."""
    if not text.has("per_layer_config"):
        return text.integer(name, default, high=MAX_HEAD_DIM)
    layers = text.nested("per_layer_config")
    found = {
        layers.nested(layer).integer(key, default, high=MAX_HEAD_DIM) for layer in layers.values
    }
    if len(found) != 1:
        raise ConfigError(
            f"'per_layer_config' has several values of {key!r}",
            where=text.where,
            expected="one for all layers without a window",
            got=sorted(found) or "none",
        )
    return found.pop()


def _temperature(arch: ArchSpec, text: Fields) -> QueryTemperature | None:
    default = arch.temperature_default
    if default is not None:
        # Some files have a number instead of true.
        if not text.values.get("attn_temperature_tuning", True):
            return None
        length = text.integer("floor_scale", default.length)
        return default._replace(beta=text.number("attn_scale", default.beta), length=length)
    key, section = "llama_4_scaling_beta", "rope_parameters"
    rope = text.nested(section) if text.has(section) else Fields({}, text.where)
    if not arch.has_query_temperature or not rope.has(key):
        return None
    length = rope.integer("original_max_position_embeddings")
    return QueryTemperature(rope.number(key), length)


def _is_rotated(arch: ArchSpec, text: Fields, windows: Sequence[Window]) -> Sequence[bool]:
    """Whether each layer has RoPE."""
    is_rotated = _rotated_layers(arch, text, windows)
    _check_chunks(arch, text, is_rotated)
    return is_rotated


def _rotated_layers(arch: ArchSpec, text: Fields, windows: Sequence[Window]) -> Sequence[bool]:
    if arch.no_rope is NoRope.GLOBAL and Window.LOCAL in windows:
        return [window is Window.LOCAL for window in windows]
    if arch.no_rope in (NoRope.ALL, NoRope.ALWAYS):
        return [False] * len(windows)
    if arch.no_rope is NoRope.STATED:
        kind = "position_embedding_type"
        is_rotated = text.has(kind) and text.text(kind) == "rope"
        return [is_rotated] * len(windows)
    if arch.no_rope is not NoRope.INTERVAL:
        return [True] * len(windows)
    if text.has("no_rope_layers"):
        flags = text.flags("no_rope_layers", len(windows))  # true means a layer with RoPE
        if flags or arch.is_rotated_without_list:
            return flags or [True] * len(windows)
    interval = text.integer("no_rope_layer_interval", NO_ROPE_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(len(windows))]


def _check_chunks(arch: ArchSpec, text: Fields, is_rotated: Sequence[bool]) -> None:
    """Raises UnsupportedModelError if other layers than those with RoPE have chunks."""
    if arch.chunk_default is None or not text.has("layer_types"):
        return
    kinds = {True: "chunked_attention", False: "full_attention"}
    if text.strings("layer_types") != [kinds[rotated] for rotated in is_rotated]:
        raise UnsupportedModelError(
            "chunks of attention in other layers than those with RoPE are not supported",
            where=text.where,
            expected="'layer_types' that agree with 'no_rope_layers'",
        )


def _check_activation(arch: ArchSpec, text: Fields) -> None:
    key = "hidden_activation" if text.has("hidden_activation") else "hidden_act"
    if not text.has(key) or text.text(key) in arch.activation_aliases:
        return
    if ACTIVATIONS.get(text.text(key)) is not arch.activation:
        raise UnsupportedModelError(
            f"activation {text.text(key)!r} is not the one of {arch.name}", where=text.where
        )


def _tied(arch: ArchSpec, top: Fields, text: Fields) -> bool:
    key = "tie_word_embeddings"
    first, second = (top, text) if arch.is_tied_by_outer else (text, top)
    return (first if first.has(key) else second).flag(key, arch.tie_embeddings_default)


def _softcap(text: Fields, key: str, default: float | None) -> float | None:
    """Value of `key`; None if the checkpoint sets it to null, `default` if the key is missing."""
    return text.optional_number(key) if key in text.values else default


def _sliding_window(arch: ArchSpec, text: Fields) -> int | None:
    is_off = arch.window_flag is not None and not text.flag(arch.window_flag, False)
    if is_off or Window.LOCAL not in arch.window_pattern:
        return None
    if "sliding_window" not in text.values:
        return arch.sliding_window_default
    return text.integer("sliding_window") if text.has("sliding_window") else None


def _checked_windows(
    arch: ArchSpec, text: Fields, layers: int, window: int | None
) -> tuple[Window, ...]:
    windows = _layer_windows(arch, text, layers, window)
    if window is None and Window.LOCAL in windows:
        raise ConfigError(
            "the architecture has sliding-window layers, but no window length is given",
            where=text.where,
            got="no 'sliding_window'",
        )
    return windows


def _layer_windows(
    arch: ArchSpec, text: Fields, layers: int, window: int | None
) -> tuple[Window, ...]:
    pattern = arch.window_pattern
    has_none = window is None and (arch.is_window_optional or Window.GLOBAL not in pattern)
    if has_none or Window.LOCAL not in pattern:
        return (Window.GLOBAL,) * layers
    if text.has("layer_types"):
        names = text.strings("layer_types")
        unknown = sorted(set(names) - set(LAYER_TYPES))
        if unknown or len(names) != layers:
            raise ConfigError(
                "'layer_types' does not describe the layers",
                where=text.where,
                expected=f"{layers} of {', '.join(LAYER_TYPES)}",
                got=f"{len(names)}, {', '.join(unknown) or 'all known'}",
            )
        return tuple(LAYER_TYPES[name] for name in names)
    if arch.window_flag is not None:
        first = text.integer("max_window_layers", layers, low=0)
        return tuple(Window.GLOBAL if i < first else Window.LOCAL for i in range(layers))
    if Window.GLOBAL not in pattern:
        return (Window.LOCAL,) * layers
    period = _period(text, pattern)
    return tuple(Window.GLOBAL if (i + 1) % period == 0 else Window.LOCAL for i in range(layers))


def _period(text: Fields, pattern: Sequence[Window]) -> int:
    """Length of the pattern, which some files spell as letters (`LLLG`)."""
    stated = text.values.get("sliding_window_pattern")
    if isinstance(stated, str) and stated and set(stated) <= {"L", "G"}:
        return len(stated)
    return text.integer("sliding_window_pattern", len(pattern))


def _ropes(arch: ArchSpec, text: Fields, head_dim: int) -> tuple[RopeConfig, ...]:
    """RoPE table of all layers, or of the GLOBAL and of the LOCAL ones."""
    base = text.number("rope_theta", arch.rope_base_default)
    scaling = Fields({}, text.where)
    local: tuple[RopeConfig, ...] = ()
    if text.has("rope_parameters"):
        parameters = text.nested("rope_parameters")
        per_type = parameters.has("full_attention")
        scaling = parameters.nested("full_attention") if per_type else parameters
        base = scaling.number("rope_theta", base)
    elif text.has("rope_scaling"):
        scaling = text.nested("rope_scaling")
    if arch.local_rope_base_default is not None or arch.has_plain_local_rope:
        local_base = text.number("rope_local_base_freq", arch.local_rope_base_default or base)
        if text.has("rope_parameters") and text.nested("rope_parameters").has("sliding_attention"):
            sliding = text.nested("rope_parameters").nested("sliding_attention")
            base_of_local = sliding.number("rope_theta", local_base)
            local = (_scaled_rope(arch, text, sliding, base_of_local, head_dim),)
        else:
            local = (RopeConfig(base=local_base, rotary_dim=head_dim),)
    global_dim = _global_head_dim(arch, text, head_dim)
    return _scaled_rope(arch, text, scaling, base, global_dim), *local


def _scaled_rope(
    arch: ArchSpec, text: Fields, scaling: Fields, base: float, head_dim: int
) -> RopeConfig:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_METHODS:
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} is not supported",
            where=text.where,
            next_step=f"Supported: {', '.join(ROPE_METHODS)}.",
        )
    if scaling.has("llama_4_scaling_beta") and not arch.has_query_temperature:
        raise UnsupportedModelError(
            "queries that grow with their position ('llama_4_scaling_beta') are not supported",
            where=text.where,
        )
    method = ROPE_METHODS[kind]
    rotary_dim = _rotary_dim(arch, text, scaling, head_dim)
    if scaling.has("alpha"):
        base = ntk_base(base, scaling.number("alpha"), rotary_dim)
    rope = RopeConfig(base=base, rotary_dim=rotary_dim, method=method)
    if method is RopeMethod.DEFAULT:
        return rope
    if method is RopeMethod.PROPORTIONAL:
        return replace(rope, rotary_dim=head_dim, rotated_pairs=rotary_dim // 2)
    if method is RopeMethod.LONGROPE:
        return _longrope(rope, text, scaling)
    rope = replace(rope, factor=scaling.number("factor"))
    if method is RopeMethod.LINEAR:
        return rope
    native = text.integer("max_position_embeddings", 2048)
    rope = replace(
        rope,
        original_max_seq_len=scaling.integer("original_max_position_embeddings", native),
    )
    if method is RopeMethod.LLAMA3:
        return replace(
            rope,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    return replace(
        rope,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(scaling, rope.factor),
        truncate=scaling.flag("truncate", True),
    )


def _rotary_dim(arch: ArchSpec, text: Fields, scaling: Fields, head_dim: int) -> int:
    """Number of values of each head that are rotated."""
    if arch.has_latent:
        return head_dim
    if text.has("rotary_dim"):
        return text.integer("rotary_dim", high=head_dim)
    key = "partial_rotary_factor"
    partial = scaling.number(key, text.number(key, arch.partial_rotary_default))
    if partial > 1.0:
        raise ConfigError(
            f"{key!r} is above 1", where=text.where, expected="at most 1", got=partial
        )
    return int(head_dim * partial)


def _longrope(rope: RopeConfig, text: Fields, scaling: Fields) -> RopeConfig:
    """Divisors for short and long contexts. Older files have the original length at top level."""
    longest = text.integer("max_position_embeddings", 2048)
    key = "original_max_position_embeddings"
    original = scaling.integer(key, text.integer(key, longest), low=2)
    factor = scaling.number("factor", longest / original)
    return replace(
        rope,
        original_max_seq_len=original,
        attention_factor=scaling.number("attention_factor", longrope_magnitude(factor, original)),
        frequency_divisors=scaling.numbers("short_factor"),
        long_divisors=scaling.numbers("long_factor"),
    )


def _yarn_attention_factor(scaling: Fields, factor: float) -> float | None:
    """The factor that the configuration gives, or None for YaRN's own formula."""
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        above = yarn_magnitude(factor, scaling.number("mscale"))
        return above / yarn_magnitude(factor, scaling.number("mscale_all_dim"))
    return None
