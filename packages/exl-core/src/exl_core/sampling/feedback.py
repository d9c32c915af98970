"""Mirostat: a cut that moves so that the tokens drawn surprise by a wanted number of bits.

The cut is a step with a value; what moves is kept here, one object per sampler and never in the
settings, which many requests may share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from exl_core.sampling.steps import DROPPED, greedy, softmax


@dataclass(frozen=True, slots=True)
class SurpriseCut:
    """Drop tokens that surprise by more than `mu` bits; the likeliest stays."""

    mu: float

    def __call__(self, logits: Tensor) -> Tensor:
        is_dropped = softmax(logits) < 2.0**-self.mu
        is_dropped[greedy(logits)] = False
        return logits.masked_fill(is_dropped, DROPPED)


class Mirostat:
    """The cut's place along one reply, so that it can be taken back with the reply's end."""

    def __init__(self, tau: float, eta: float) -> None:
        self._tau = tau
        self._eta = eta
        self._trace: list[tuple[int, float]] = []  # after that many tokens, the cut

    @property
    def mu(self) -> float:
        return self._trace[-1][1] if self._trace else 2.0 * self._tau

    def accept(self, length: int, probability: float) -> None:
        """A token of this final probability made the history `length` tokens long."""
        surprise = -math.log2(probability)
        # Far outside, the cut keeps one token or all, and powers of two overflow.
        mu = min(max(self.mu + self._eta * (self._tau - surprise), -1000.0), 1000.0)
        self._trace.append((length, mu))

    def rewind(self, length: int) -> None:
        while self._trace and self._trace[-1][0] > length:
            self._trace.pop()
