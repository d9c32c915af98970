"""Inverse frequencies of rotary position embeddings (Su et al. 2021, arXiv 2104.09864).

Plain floats; `model/rotation.py` turns them into angles. Scalings follow the models' own
definitions: linear (Chen et al. 2023, arXiv 2306.15595), NTK-alpha (base * alpha^(d/(d-2))),
Llama 3 (Meta's reference code, wavelength bands), YaRN (Peng et al. 2023, arXiv 2309.00071) and
LongRoPE (Ding et al. 2024, arXiv 2402.13753).
"""

from __future__ import annotations

import math

from exl_core.arch.spec import RopeConfig, RopeMethod


def inverse_frequencies(rope: RopeConfig) -> tuple[list[float], float]:
    """Radians per position [rotary_dim / 2], and the factor on cos and sin."""
    dim = rope.rotary_dim
    base = ntk_base(rope.base, rope.alpha, dim)
    plain = [base ** (-2.0 * j / dim) for j in range(dim // 2)]
    multiplier = 1.0
    match rope.method:
        case RopeMethod.DEFAULT:
            scaled = plain
        case RopeMethod.LINEAR:
            scaled = [f / rope.factor for f in plain]
        case RopeMethod.LLAMA3:
            scaled = [_llama3(f, rope) for f in plain]
        case RopeMethod.YARN:
            scaled = _yarn(plain, base, rope)
            multiplier = rope.attention_factor or yarn_magnitude(rope.factor)
        case RopeMethod.PROPORTIONAL:
            scaled = [f if j < rope.rotated_pairs else 0.0 for j, f in enumerate(plain)]
        case RopeMethod.LONGROPE:
            scaled = plain  # the divisors below are its scaling
            multiplier = rope.attention_factor or 1.0
    if rope.frequency_divisors:
        scaled = [f / d for f, d in zip(scaled, rope.frequency_divisors, strict=True)]
    return scaled, multiplier


def _llama3(frequency: float, rope: RopeConfig) -> float:
    """Llama 3's scaling: stretches long wavelengths, keeps short ones, interpolates between."""
    wavelength = 2.0 * math.pi / frequency
    longest_kept = rope.original_max_seq_len / rope.high_freq_factor
    shortest_stretched = rope.original_max_seq_len / rope.low_freq_factor
    if wavelength < longest_kept:
        return frequency
    if wavelength >= shortest_stretched:
        return frequency / rope.factor
    blend = (rope.original_max_seq_len / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1.0 - blend) * frequency / rope.factor + blend * frequency


def _yarn(plain: list[float], base: float, rope: RopeConfig) -> list[float]:
    """YaRN's scaling: keeps dimensions with many rotations within the original context, stretches
    those with few."""
    dim = rope.rotary_dim

    def dimension_with(rotations: float) -> float:
        span = rope.original_max_seq_len / (rotations * 2.0 * math.pi)
        return dim * math.log(span) / (2.0 * math.log(base))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero; the ramp becomes a step
    scaled = []
    for j, frequency in enumerate(plain):
        stretched = min(max((j - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency * (1.0 - stretched + stretched / rope.factor))
    return scaled


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on cos and sin, which compensates for the longer context."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def longrope_magnitude(factor: float, original: int) -> float:
    """LongRoPE's factor on cos and sin, for a context `factor` times the original one."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def ntk_base(base: float, alpha: float, rotary_dim: int) -> float:
    """The base raised by the NTK factor `alpha`; infinite if it is too large for a float.

    Unchanged for 2 dimensions, which `checks.py` refuses.
    """
    if alpha == 1.0 or rotary_dim <= 2:
        return base
    try:
        return float(base * alpha ** (rotary_dim / (rotary_dim - 2)))
    except OverflowError:
        return math.inf
