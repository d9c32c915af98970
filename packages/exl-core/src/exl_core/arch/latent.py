"""Reads the numbers of latent attention, from `config.json` or from the metadata of a GGUF file.

YaRN changes the factor of the scores too: it is multiplied by the square of a magnitude, for which
checkpoints have `mscale_all_dim`, and GGUF files a tenth of it (`yarn_log_multiplier`).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from exl_core.arch.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_INTERMEDIATE_SIZE, Fields
from exl_core.arch.layers import MLA, QueryTemperature
from exl_core.arch.rope import yarn_magnitude
from exl_core.arch.spec import ArchSpec, RopeConfig, RopeMethod
from exl_core.errors import UnsupportedModelError

ROPE_DIM_KEY = "qk_rope_head_dim"
LOG_MULTIPLIER_KEY = "rope.scaling.yarn_log_multiplier"
INNER_EPS = 1e-6  # of the norms of latent vectors, whatever the other norms have


def hf_latent(
    arch: ArchSpec, text: Fields, rope: RopeConfig, temperature: QueryTemperature | None
) -> MLA | None:
    """Numbers of the latent attention; None if the family has none. `rope`: the RoPE table."""
    if not arch.has_latent:
        return None
    has_rank = text.has("q_lora_rank")
    nope_dim = text.integer("qk_nope_head_dim", high=MAX_HEAD_DIM)
    section = next((key for key in ("rope_parameters", "rope_scaling") if text.has(key)), None)
    scaling = Fields({}, text.where) if section is None else text.nested(section)
    return MLA(
        num_q_heads=text.integer("num_attention_heads", high=MAX_HEADS),
        q_rank=text.integer("q_lora_rank", high=MAX_INTERMEDIATE_SIZE) if has_rank else 0,
        kv_rank=text.integer("kv_lora_rank", high=MAX_HEAD_DIM),
        nope_dim=nope_dim,
        rope_dim=rope.rotary_dim,
        value_dim=text.integer("v_head_dim", high=MAX_HEAD_DIM),
        scale=_scale(nope_dim, rope, _optional(scaling, "mscale_all_dim")),
        temperature=temperature,
        norm_eps=INNER_EPS,
        has_bias=text.flag(arch.bias_key, arch.has_bias_default),
    )


def gguf_latent(
    arch: ArchSpec,
    own: Fields,
    tensor_names: Collection[str],
    rope: RopeConfig,
    temperature: QueryTemperature | None,
) -> MLA | None:
    """The same for a GGUF file. Files of 2025 and later have the sizes of a head under keys of
    their own, and those of a cached row under the usual keys."""
    if not arch.has_latent:
        return None
    kind = "_mla" if own.has("attention.key_length_mla") else ""
    head_dim = own.integer(f"attention.key_length{kind}", high=MAX_HEAD_DIM)
    value_dim = own.integer(f"attention.value_length{kind}", high=MAX_HEAD_DIM)
    if head_dim <= rope.rotary_dim:
        raise UnsupportedModelError(
            "heads without a part that is not rotated are not supported",
            where=own.where,
            expected=f"'attention.key_length{kind}' above {rope.rotary_dim}",
            got=head_dim,
        )
    key = "attention.q_lora_rank"
    has_rank = arch.gguf.is_stored("q_a", "weight", tensor_names, layer=0)
    multiplier = _optional(own, LOG_MULTIPLIER_KEY)
    magnitude = None if multiplier is None else 10.0 * multiplier
    return MLA(
        num_q_heads=own.integer("attention.head_count", high=MAX_HEADS),
        q_rank=own.integer(key, high=MAX_INTERMEDIATE_SIZE) if has_rank else 0,
        kv_rank=own.integer("attention.kv_lora_rank", high=MAX_HEAD_DIM),
        nope_dim=head_dim - rope.rotary_dim,
        rope_dim=rope.rotary_dim,
        value_dim=value_dim,
        scale=_scale(head_dim - rope.rotary_dim, rope, magnitude),
        temperature=temperature,
        norm_eps=INNER_EPS,
        has_bias=arch.gguf.is_stored("kv_a", "bias", tensor_names, layer=0),
        has_split_up=not arch.gguf.is_stored("kv_up", "weight", tensor_names, layer=0),
    )


def _optional(fields: Fields, key: str) -> float | None:
    """A number; None if it is missing or 0."""
    return fields.number(key) if fields.values.get(key) else None


def _scale(nope_dim: int, rope: RopeConfig, mscale_all_dim: float | None) -> float:
    scale = math.pow(nope_dim + rope.rotary_dim, -0.5)
    if rope.method is not RopeMethod.YARN or mscale_all_dim is None:
        return scale
    return scale * yarn_magnitude(rope.factor, mscale_all_dim) ** 2
