"""Consistency checks on a model's configuration, independent of the file that it came from."""

from __future__ import annotations

import math

from exl_core.arch.layers import (
    MLA,
    Attention,
    Dense,
    GatedDeltaNet,
    KimiDeltaNet,
    Mamba2,
    MoE,
    NoFeedForward,
    NoMixer,
    ShortConv,
    unsupported,
)
from exl_core.arch.rope import inverse_frequencies
from exl_core.arch.spec import ModelConfig, RopeConfig, RopeMethod
from exl_core.errors import ConfigError


def check_config(config: ModelConfig, where: object) -> None:
    """Raises `ConfigError` for values that no model of this kind can have."""

    def require(holds: bool, what: str, got: object) -> None:
        if not holds:
            raise ConfigError(what, where=where, got=got)

    attending = [layer.attending for layer in config.layers if layer.attending is not None]
    require(bool(attending), "the model has no layer of attention", f"{len(config.layers)} others")
    for attention in dict.fromkeys(attending):
        if isinstance(attention, Attention):
            require(
                attention.num_q_heads % attention.num_kv_heads == 0,
                "the query heads cannot be shared out evenly among the key/value heads",
                f"{attention.num_q_heads} query heads, {attention.num_kv_heads} key/value heads",
            )
    for layer in dict.fromkeys(config.layers):
        recurrent = ShortConv | GatedDeltaNet | KimiDeltaNet | Mamba2
        if not isinstance(layer.mixer, Attention | MLA | recurrent | NoMixer):
            raise unsupported("mixer", layer.mixer)
        if not isinstance(layer.feed_forward, Dense | MoE | NoFeedForward):
            raise unsupported("feed-forward part", layer.feed_forward)
    head_dims = [
        (one.rope, one.head_dim if isinstance(one, Attention) else one.rope_dim)
        for one in attending
    ]
    for index, rope in enumerate(config.ropes):
        # A table that no layer uses must still fit the heads.
        sizes = [size for used, size in head_dims if used == index]
        _check_rope(rope, min(sizes or [size for _, size in head_dims]), where)
    for token_id in (config.bos_id, *config.eos_ids):
        require(
            token_id is None or token_id < config.vocab_size,
            f"a control token lies outside the vocabulary of {config.vocab_size}",
            token_id,
        )


def _check_rope(rope: RopeConfig, head_dim: int, where: object) -> None:
    if not 2 < rope.rotary_dim <= head_dim or rope.rotary_dim % 2:
        raise ConfigError(
            "the rotated part of a head has an impossible size",
            where=where,
            expected=f"an even number from 4 to {head_dim}",
            got=rope.rotary_dim,
        )
    if rope.method is RopeMethod.LLAMA3 and rope.high_freq_factor < rope.low_freq_factor:
        raise ConfigError(
            "RoPE scaling llama3 needs high_freq_factor of at least low_freq_factor",
            where=where,
            got=f"{rope.high_freq_factor} and {rope.low_freq_factor}",
        )
    if rope.base <= 1.0:
        raise ConfigError(
            "the RoPE base is too small", where=where, expected="above 1", got=rope.base
        )
    divisors = (*rope.frequency_divisors, *rope.long_divisors)
    if any(not 0.0 < divisor < math.inf for divisor in divisors):
        raise ConfigError("the RoPE factors hold values that cannot divide", where=where)
    for found in (rope.frequency_divisors, rope.long_divisors):
        if found and len(found) != rope.rotary_dim // 2:
            raise ConfigError(
                "a list of RoPE factors has the wrong length",
                where=where,
                expected=rope.rotary_dim // 2,
                got=len(found),
            )
    frequencies, multiplier = inverse_frequencies(rope)
    if rope.method is RopeMethod.PROPORTIONAL:
        frequencies = frequencies[: rope.rotated_pairs]  # the others are 0
    if not all(math.isfinite(f) and f > 0.0 for f in (*frequencies, multiplier)):
        raise ConfigError("the RoPE scaling gives impossible frequencies", where=where, got=rope)
