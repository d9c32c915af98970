"""Cosines and sines of rotary positions, computed once per position and kept; factors on queries.

A pass looks up its rows. Computing them anew would take longer than a kernel call. The table grows
with the longest position used, and is smaller than the keys and values up to that position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.arch.layers import QueryTemperature
from exl_core.arch.rope import inverse_frequencies
from exl_core.arch.spec import RopeConfig

_GROWTH = 1024  # smallest growth in positions; also the number computed at a time, in float64


def query_factors(setting: QueryTemperature, positions: Tensor) -> Tensor | None:
    """Factors on the queries at int64 positions [R], float32 [R]; None if all are 1. The host does
    not read positions that are on a GPU."""
    periods = (positions + setting.offset) // setting.length
    if positions.device.type == "cpu" and not bool(periods.any()):
        return None
    return 1.0 + setting.beta * torch.log1p(periods.to(torch.float32))


class RotationTable:
    """Table of one RoPE setting, float32 [positions, rotary_dim / 2], on one device."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        frequencies, self._multiplier = inverse_frequencies(rope)
        # float64, because position * frequency reaches 1e5 radians in long contexts.
        self._frequencies = torch.tensor(frequencies, dtype=torch.float64)
        self._device = device
        self._retired: list[tuple[Tensor, Tensor]] = []  # captured graphs may still read them
        empty = torch.empty(0, len(frequencies), device=device)
        self._rows = empty, empty  # cos and sin, replaced together

    def reserve(self, end: int) -> None:
        """Computes the positions below `end` that are not in the table yet."""
        if end > self._rows[0].shape[0]:
            if self._device.type != "cpu":
                self._retired.append(self._rows)
            self._rows = self._grown(end)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [R, rotary_dim / 2], for int64 positions [R].

        The host does not read positions that are on a GPU. They must be below the largest `end`
        passed to `reserve`.
        """
        if positions.device.type == "cpu":
            self.reserve(max(positions.tolist(), default=-1) + 1)
            positions = positions.to(self._device)
        cos, sin = self._rows
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _grown(self, end: int) -> tuple[Tensor, Tensor]:
        old_cos, old_sin = self._rows
        known = old_cos.shape[0]
        size = -(-max(end, known * 3 // 2) // _GROWTH) * _GROWTH
        cos, sin = (torch.empty(size, old_cos.shape[1], device=self._device) for _ in range(2))
        cos[:known], sin[:known] = old_cos, old_sin
        for first in range(known, size, _GROWTH):
            at = torch.arange(first, first + _GROWTH, dtype=torch.float64)
            angles = torch.outer(at, self._frequencies)
            cos[first : first + _GROWTH] = torch.cos(angles) * self._multiplier
            sin[first : first + _GROWTH] = torch.sin(angles) * self._multiplier
        return cos, sin
