"""Reads a `ModelConfig` from the metadata of a GGUF file.

Key names: the GGUF specification in the ggml repository. Values that the format does not store,
such as Gemma 3's local RoPE base, come from the architecture. This module sees metadata only; the
caller passes in whether the file has a separate head, biases or RoPE factors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from exl_core.arch.blocks import as_blocks, gguf_blocks
from exl_core.arch.checks import check_config
from exl_core.arch.experts import GATING_FUNCTIONS, ROUTER_BIAS, gguf_experts
from exl_core.arch.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    Fields,
)
from exl_core.arch.latent import LOG_MULTIPLIER_KEY, gguf_latent
from exl_core.arch.layers import (
    XIELU_BETA,
    Activation,
    HeadNorm,
    NormKind,
    QueryTemperature,
    Scores,
)
from exl_core.arch.recurrent import gguf_recurrent
from exl_core.arch.registry import find_by_gguf_name
from exl_core.arch.rope import yarn_magnitude
from exl_core.arch.spec import (
    ArchSpec,
    LayerNumbers,
    ModelConfig,
    Multipliers,
    NoRope,
    Recurrence,
    RopeConfig,
    RopeMethod,
    Window,
    with_windows,
    without_rope,
)
from exl_core.errors import ConfigError, UnsupportedModelError

EPS_KEYS = {True: "attention.layer_norm_rms_epsilon", False: "attention.layer_norm_epsilon"}
"""Key of the norms' epsilon, by whether they are RMSNorms."""
NO_ROPE_INTERVAL = 4  # the format has no key for it
TEMPERATURE_KEYS = frozenset(
    {"attention.temperature_scale", "attention.temperature_length", LOG_MULTIPLIER_KEY}
)
PATTERN_KEY = "attention.sliding_window_pattern"
UNROTATED = 1e29
"""Divisors above it mark pairs that are not rotated: files have 1e30."""
EXPERTS_WITHOUT_HEAD_NORM = 128
"""Readers recognize Llama 4 Maverick, which has no head norm, by its number of experts."""
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
ROPE_METHODS = {
    "none": RopeMethod.DEFAULT,
    "linear": RopeMethod.LINEAR,
    "yarn": RopeMethod.YARN,
}

ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_FACTORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)
"""Names of tensors with divisors of the RoPE frequencies."""

SCALING_KEYS = frozenset(
    f"rope.scaling.{name}"
    for name in (
        "type",
        "factor",
        "original_context_length",
        "finetuned",
        "attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
    )
)


def gguf_architecture(
    metadata: Mapping[str, object], tensor_names: Collection[str], where: object
) -> ArchSpec:
    name = Fields(metadata, where).text("general.architecture")
    has_experts = metadata.get(f"{name}.expert_count") not in (None, 0)
    gating = metadata.get(f"{name}.expert_gating_func")
    scores = GATING_FUNCTIONS.get(gating)  # type: ignore[call-overload]
    if gating is None and any(tensor.endswith(ROUTER_BIAS) for tensor in tensor_names):
        scores = Scores.SIGMOID  # the first files of GLM-4.7-Flash lack the key
    return find_by_gguf_name(name, where=where, has_experts=has_experts, scores=scores)


def read_gguf_config(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    where: object,
    rope_factors: Mapping[str, tuple[float, ...]] | None = None,
) -> ModelConfig:
    """The configuration that the metadata describe, checked for consistency.

    `rope_factors`: values of the tensors with RoPE factors that the file has, by their names.
    """
    arch = gguf_architecture(metadata, tensor_names, where)
    prefix = Fields(metadata, where).text("general.architecture") + "."
    own = Fields({k.removeprefix(prefix): v for k, v in metadata.items()}, where)
    hidden_size = own.integer("embedding_length", high=MAX_HIDDEN_SIZE)
    layers = _num_layers(own)
    heads = _by_layer(own, "attention.head_count", layers, MAX_HEADS)
    head_dim = own.integer(
        "attention.key_length", arch.head_dim_default or hidden_size // heads[0], high=MAX_HEAD_DIM
    )
    _refuse_unknown_parts(arch, own)
    ropes = _ropes(arch, own, head_dim, rope_factors or {})
    pattern, window = _windows(arch, own)
    windows = tuple(pattern[i % len(pattern)] for i in range(layers))
    numbers = _layer_numbers(arch, own, tensor_names, head_dim)
    latent = gguf_latent(arch, own, tensor_names, ropes[0], numbers[0].temperature)
    numbers = [replace(one, latent=latent) for one in numbers]
    if arch.global_head_dim_default is not None:
        numbers = _own_heads(arch, own, tensor_names, numbers, windows)
    numbers = _with_activations(arch, Fields(metadata, where), numbers)
    by_layer = with_windows(numbers, windows, window, len(ropes))
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    vocab_default = len(vocabulary) if isinstance(vocabulary, list) else None
    tokens = Fields(metadata, where)
    config = ModelConfig(
        arch=arch,
        layers=arch.layers(without_rope(by_layer, _is_rotated(arch, own, windows))),
        ropes=ropes,
        hidden_size=hidden_size,
        vocab_size=own.integer("vocab_size", vocab_default, high=MAX_VOCAB_SIZE),
        max_seq_len=own.integer("context_length"),
        norm_eps=own.number(EPS_KEYS[arch.norm_kind is NormKind.RMS]),
        final_softcap=own.optional_number("final_logit_softcapping") or arch.final_softcap_default,
        has_tied_embeddings=not arch.gguf.is_stored("head", "weight", tensor_names),
        bos_id=tokens.first_token_id("tokenizer.ggml.bos_token_id"),
        eos_ids=tokens.token_ids("tokenizer.ggml.eos_token_id"),
        pad_id=tokens.first_token_id("tokenizer.ggml.padding_token_id"),
        multipliers=_multipliers(arch, own),
        num_positions=own.integer("context_length") if arch.no_rope is NoRope.ALL else 0,
    )
    check_config(config, where)
    return config


def _num_layers(own: Fields) -> int:
    """Layers of the model, without those for multi-token prediction, which are the last ones."""
    total = own.integer("block_count", high=MAX_LAYERS)
    ahead = own.integer("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    if ahead >= total:
        raise ConfigError(
            "'nextn_predict_layers' leaves no layers",
            where=own.where,
            expected=f"less than {total}",
            got=ahead,
        )
    return total - ahead


def _layer_numbers(
    arch: ArchSpec, own: Fields, tensor_names: Collection[str], head_dim: int
) -> list[LayerNumbers]:
    """Numbers of each layer, without its window."""
    hidden_size = own.integer("embedding_length", high=MAX_HIDDEN_SIZE)
    layers = _num_layers(own)
    heads = _by_layer(own, "attention.head_count", layers, MAX_HEADS)
    low = 1 if arch.recurrence is Recurrence.NONE else 0
    kv_heads = _by_layer(own, "attention.head_count_kv", layers, MAX_HEADS, heads, low=low)
    recurrent = gguf_recurrent(arch, own, tensor_names, kv_heads)
    key = "expert_shared_feed_forward_length"
    is_shared = arch.intermediate_size_key == "shared_intermediate_size" and own.has(key)
    key = key if is_shared else "feed_forward_length"
    low_width = 0 if arch.has_single_parts else 1
    widths = _by_layer(own, key, layers, MAX_INTERMEDIATE_SIZE, low=low_width)
    scale = arch.attention_scale
    if scale is None:
        scale = _attention_scale(arch, layers, hidden_size, heads[0], head_dim)
    first = LayerNumbers(
        num_q_heads=heads[0],
        num_kv_heads=max(kv_heads),
        head_dim=head_dim,
        scale=own.number("attention.scale", scale),
        rope=0,
        window=0,
        softcap=own.optional_number("attn_logit_softcapping") or arch.attention_softcap_default,
        has_qkv_bias=arch.gguf.is_stored("q", "bias", tensor_names, layer=0),
        has_output_bias=arch.gguf.is_stored("output", "bias", tensor_names, layer=0),
        intermediate_size=max(widths),
        has_mlp_bias=arch.gguf.is_stored("up", "bias", tensor_names, layer=0),
        temperature=_temperature(arch, own),
        head_norm=_head_norm(arch, own, tensor_names),
        clip=own.optional_number("attention.clamp_kqv") if arch.has_qkv_clip else None,
        chunk=_chunk(arch, own),
    )
    experts = gguf_experts(arch, own, tensor_names, layers)
    found = [
        replace(
            replace(first, num_q_heads=q, num_kv_heads=kv or first.num_kv_heads),
            intermediate_size=width or first.intermediate_size,
            experts=part,
            recurrent=mixer,
        )
        for q, kv, width, part, mixer in zip(
            heads, kv_heads, widths, experts, recurrent, strict=True
        )
    ]
    if not arch.has_single_parts:
        return found
    has_experts = any(part is not None for part in experts)
    return as_blocks(found, gguf_blocks(own, kv_heads, widths, has_experts=has_experts))


def _own_heads(
    arch: ArchSpec,
    own: Fields,
    tensor_names: Collection[str],
    numbers: Sequence[LayerNumbers],
    windows: Sequence[Window],
) -> list[LayerNumbers]:
    """The same numbers, with the heads of LOCAL layers, and without the values of layers that
    project none: these are the keys."""
    local_dim = own.integer("attention.key_length_swa", arch.head_dim_default, high=MAX_HEAD_DIM)
    found = []
    for layer, (one, window) in enumerate(zip(numbers, windows, strict=True)):
        has_values = arch.gguf.is_stored("v", "weight", tensor_names, layer)
        head_dim = local_dim if window is Window.LOCAL else one.head_dim
        found.append(replace(one, head_dim=head_dim, is_value_key=not has_values))
    return found


def _with_activations(
    arch: ArchSpec, fields: Fields, numbers: Sequence[LayerNumbers]
) -> list[LayerNumbers]:
    """The same numbers, with those of the activation, which files list by layer."""
    if arch.activation is not Activation.XIELU:
        return list(numbers)
    lists = [fields.signed_numbers(f"xielu.{key}", len(numbers)) for key in ("alpha_p", "alpha_n")]
    betas = fields.signed_numbers("xielu.beta", len(numbers))
    if any(not math.isclose(beta, XIELU_BETA, rel_tol=1e-3) for beta in betas):
        raise UnsupportedModelError(
            "the activation's 'xielu.beta' is not supported",
            where=fields.where,
            expected=XIELU_BETA,
            got=betas[0],
        )
    return [
        replace(one, activation_numbers=pair)
        for one, pair in zip(numbers, zip(*lists, strict=True), strict=True)
    ]


def _refuse_unknown_parts(arch: ArchSpec, own: Fields) -> None:
    """Refuses variants of Gemma 4 that need more than decoder layers."""
    if arch.global_head_dim_default is None:
        return
    for key, what in (
        ("embedding_length_per_layer_input", "embeddings of their own for each layer (E2B, E4B)"),
        ("attention.shared_kv_layers", "layers that share keys and values (E2B, E4B)"),
    ):
        if own.integer(key, 0, low=0) > 0:
            raise UnsupportedModelError(
                f"{arch.name} models with {what} are not supported",
                where=own.where,
                next_step="12B, 26B-A4B and 31B are.",
            )


def _chunk(arch: ArchSpec, own: Fields) -> int:
    """Positions of a chunk of attention, for which most files have no key; 0: no chunks."""
    if arch.chunk_default is None:
        return 0
    return own.integer("attention.sliding_window", arch.chunk_default)


def _head_norm(arch: ArchSpec, own: Fields, tensor_names: Collection[str]) -> HeadNorm | None:
    if arch.has_head_norm_default:  # it has no factors, and the format no key for it
        is_without = own.values.get("expert_count") == EXPERTS_WITHOUT_HEAD_NORM
        return None if is_without else arch.optional_head_norm
    has_norm = arch.gguf.is_stored("q_norm", "weight", tensor_names, layer=0)
    return arch.optional_head_norm if has_norm else None


def _multipliers(arch: ArchSpec, own: Fields) -> Multipliers:
    if arch.logit_scale_default is not None:
        return Multipliers(logits=own.number("logit_scale", arch.logit_scale_default))
    if not arch.has_multipliers:
        return Multipliers()
    return Multipliers(
        embedding=own.number("embedding_scale", 1.0),
        residual=own.number("residual_scale", 1.0),
        logits=1.0 / own.number("logit_scale", 1.0),
    )


def _temperature(arch: ArchSpec, own: Fields) -> QueryTemperature | None:
    if arch.temperature_default is not None:
        return arch.temperature_default
    key = "attention.temperature_scale"
    if not arch.has_query_temperature or not own.has(key):
        return None
    length = own.integer("rope.scaling.original_context_length")
    return QueryTemperature(own.number(key), length)


def _is_rotated(arch: ArchSpec, own: Fields, windows: Sequence[Window]) -> Sequence[bool]:
    """Whether each layer has RoPE."""
    match arch.no_rope:
        case NoRope.GLOBAL if Window.LOCAL in windows:
            return [window is Window.LOCAL for window in windows]
        case NoRope.INTERVAL:
            return [(layer + 1) % NO_ROPE_INTERVAL != 0 for layer in range(len(windows))]
        case NoRope.ALL | NoRope.ALWAYS:
            return [False] * len(windows)
        case NoRope.STATED:  # the format has no key of its own for it
            return [own.flag("rope.scaling.finetuned", True)] * len(windows)
        case _:
            return [True] * len(windows)


def _by_layer(
    own: Fields,
    key: str,
    layers: int,
    high: int,
    default: Sequence[int] | None = None,
    *,
    low: int = 1,
) -> Sequence[int]:
    """Value of `key` for each layer. Files store one number for all layers, or a list."""
    value = own.values.get(key)
    if not isinstance(value, list):
        if value is None and default is not None:
            return default
        return [own.integer(key, low=low, high=high)] * layers
    if len(value) not in (layers, own.integer("block_count")):
        raise ConfigError(
            f"{key!r} does not describe the layers",
            where=own.where,
            expected=f"{layers} numbers",
            got=len(value),
        )
    return [
        Fields({key: item}, own.where).integer(key, low=low, high=high) for item in value[:layers]
    ]


def _windows(arch: ArchSpec, own: Fields) -> tuple[tuple[Window, ...], int | None]:
    """Pattern of windows, and their length."""
    key, pattern = "attention.sliding_window", arch.window_pattern
    if Window.LOCAL not in pattern:
        return pattern, None
    if arch.is_window_optional and not own.has(key):
        return (Window.GLOBAL,), None
    if Window.GLOBAL in pattern:
        if isinstance(own.values.get(PATTERN_KEY), list):  # one entry for each layer
            is_local = own.flags(PATTERN_KEY, own.integer("block_count", high=MAX_LAYERS))
            pattern = tuple(Window.LOCAL if one else Window.GLOBAL for one in is_local)
        return pattern, own.integer(key, arch.sliding_window_default)
    # Families that can have a window in every layer. Most of their files do not say whether it is
    # used; 0 means that it is not.
    length = own.integer(key, low=0) if own.has(key) and arch.window_flag is None else 0
    return (pattern, length) if length else ((Window.GLOBAL,), None)


def _attention_scale(
    arch: ArchSpec, layers: int, hidden_size: int, heads: int, head_dim: int
) -> float:
    # The 27B Gemmas scale by hidden_size / heads. The format has no key for this, so readers
    # recognize these models by their number of layers.
    is_gemma_27b = layers == GEMMA_27B_LAYERS.get(arch.name)
    return math.pow(hidden_size / heads if is_gemma_27b else head_dim, -0.5)


def _refuse_unknown_scaling(arch: ArchSpec, own: Fields) -> None:
    """Refuses unknown RoPE scaling keys: ignoring one would degrade the text unnoticed."""
    for key in own.values:
        is_scaling = key.startswith(("rope.scaling.", "rope.scale_", "attention.temperature_"))
        known = SCALING_KEYS | (TEMPERATURE_KEYS if arch.has_query_temperature else frozenset())
        known |= {LOG_MULTIPLIER_KEY} if arch.has_latent else frozenset()
        if is_scaling and key not in known:
            raise UnsupportedModelError(
                f"RoPE setting {key!r} is not supported",
                where=own.where,
                next_step=f"Supported: {', '.join(sorted(SCALING_KEYS))}.",
            )


def _ropes(
    arch: ArchSpec, own: Fields, head_dim: int, factors: Mapping[str, tuple[float, ...]]
) -> tuple[RopeConfig, ...]:
    """RoPE table of all layers, or of the GLOBAL and of the LOCAL ones."""
    rotary_dim = own.integer("rope.dimension_count", head_dim, high=MAX_HEAD_DIM)
    base = own.number("rope.freq_base", arch.rope_base_default)
    rope = RopeConfig(base=base, rotary_dim=rotary_dim)
    _refuse_unknown_scaling(arch, own)
    if ROPE_LONG in factors:
        return (_longrope(rope, own, factors),)
    rope = replace(rope, frequency_divisors=factors.get(ROPE_FREQS, ()))
    kind = own.text("rope.scaling.type", "none")
    if kind not in ROPE_METHODS:
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} is not supported",
            where=own.where,
            next_step=f"Supported: {', '.join(ROPE_METHODS)}.",
        )
    rope = replace(rope, method=ROPE_METHODS[kind])
    if rope.method is not RopeMethod.DEFAULT:
        rope = replace(
            rope,
            factor=own.number("rope.scaling.factor"),
            original_max_seq_len=own.integer(
                "rope.scaling.original_context_length", own.integer("context_length")
            ),
        )
    if rope.method is RopeMethod.YARN:
        # The stored factor multiplies the method's own one.
        own_factor = yarn_magnitude(rope.factor)
        if arch.has_latent and own.has(LOG_MULTIPLIER_KEY):
            own_factor = 1.0  # the factor of the scores contains the magnitude
        elif own.has(LOG_MULTIPLIER_KEY):  # the configuration's 'mscale_all_dim'
            own_factor /= yarn_magnitude(rope.factor, own.number(LOG_MULTIPLIER_KEY))
        rope = replace(
            rope,
            beta_fast=own.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=own.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=own_factor * own.number("rope.scaling.attn_factor", 1.0),
            truncate=arch.has_rounded_yarn,
        )
    if arch.local_rope_base_default is None and not arch.has_plain_local_rope:
        return (rope,)
    local_base = own.number("rope.freq_base_swa", arch.local_rope_base_default or base)
    if arch.global_head_dim_default is not None:
        rope = _proportional(rope)
        rotary_dim = own.integer(
            "rope.dimension_count_swa", arch.head_dim_default, high=MAX_HEAD_DIM
        )
    return rope, RopeConfig(base=local_base, rotary_dim=rotary_dim)


def _proportional(rope: RopeConfig) -> RopeConfig:
    """The table whose divisors are 1 for rotated pairs and huge for the others."""
    divisors = rope.frequency_divisors
    rotated = sum(divisor < UNROTATED for divisor in divisors)
    if not divisors or any(divisor != 1.0 for divisor in divisors[:rotated]):
        return rope
    method = RopeMethod.PROPORTIONAL
    return replace(rope, method=method, frequency_divisors=(), rotated_pairs=rotated)


def _longrope(
    rope: RopeConfig, own: Fields, factors: Mapping[str, tuple[float, ...]]
) -> RopeConfig:
    """Divisors for short and long contexts, which files store as tensors."""
    if ROPE_SHORT not in factors:
        raise ConfigError(f"the file has {ROPE_LONG!r} without {ROPE_SHORT!r}", where=own.where)
    return replace(
        rope,
        method=RopeMethod.LONGROPE,
        original_max_seq_len=own.integer("rope.scaling.original_context_length"),
        attention_factor=own.number("rope.scaling.attn_factor", 1.0),
        frequency_divisors=factors[ROPE_SHORT],
        long_divisors=factors[ROPE_LONG],
    )
