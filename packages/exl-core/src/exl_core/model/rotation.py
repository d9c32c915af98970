"""Cosines and sines of rotary positions, computed once for each position that is ever used.

A step looks up its few rows; computing them would take longer than a kernel call. The table grows
with the longest position seen, and weighs less than the keys and values up to there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.arch.rope import inverse_frequencies
from exl_core.arch.spec import RopeConfig

_GROWTH = 1024  # positions at least; also how many are computed at a time, in float64


class RotationTable:
    """Rows of one RoPE setting, float32 [positions, rotary_dim / 2]."""

    def __init__(self, rope: RopeConfig) -> None:
        frequencies, self._multiplier = inverse_frequencies(rope)
        # float64, because position * frequency reaches 1e5 radians in long contexts.
        self._frequencies = torch.tensor(frequencies, dtype=torch.float64)
        empty = torch.empty(0, len(frequencies))
        self._rows = empty, empty  # cos and sin, replaced together

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [R, rotary_dim / 2], for int64 positions [R]."""
        end = max(positions.tolist(), default=-1) + 1
        cos, sin = self._rows
        if end > cos.shape[0]:
            cos, sin = self._rows = self._grown(end)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _grown(self, end: int) -> tuple[Tensor, Tensor]:
        old_cos, old_sin = self._rows
        known = old_cos.shape[0]
        size = -(-max(end, known * 3 // 2) // _GROWTH) * _GROWTH
        cos, sin = (torch.empty(size, old_cos.shape[1]) for _ in range(2))
        cos[:known], sin[:known] = old_cos, old_sin
        for first in range(known, size, _GROWTH):
            at = torch.arange(first, first + _GROWTH, dtype=torch.float64)
            angles = torch.outer(at, self._frequencies)
            cos[first : first + _GROWTH] = torch.cos(angles) * self._multiplier
            sin[first : first + _GROWTH] = torch.sin(angles) * self._multiplier
        return cos, sin
