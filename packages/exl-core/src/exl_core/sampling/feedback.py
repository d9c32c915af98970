"""Mirostat: a cut that moves so that sampled tokens have a given mean surprise in bits.

The cut itself is a step with a value. The moving state is one object per sampler; it is not part of
the settings, which many requests may share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from exl_core.sampling.steps import DROPPED, greedy, softmax


@dataclass(frozen=True, slots=True)
class SurpriseCut:
    """Drop tokens whose surprise exceeds `mu` bits; the likeliest token is kept."""

    mu: float

    def __call__(self, logits: Tensor) -> Tensor:
        is_dropped = softmax(logits) < 2.0**-self.mu
        is_dropped[greedy(logits)] = False
        return logits.masked_fill(is_dropped, DROPPED)


class Mirostat:
    """The cut after each token of one reply, so that it can be rewound with the reply."""

    def __init__(self, tau: float, eta: float, start: float | None = None) -> None:
        self._tau = tau
        self._eta = eta
        self._start = 2.0 * tau if start is None else start
        self._trace: list[tuple[int, float]] = []  # length of the history, cut from there on

    @property
    def mu(self) -> float:
        return self._trace[-1][1] if self._trace else self._start

    def accept(self, length: int, probability: float) -> None:
        """Record a token of this final probability, which made the history `length` long."""
        surprise = -math.log2(probability)
        # Beyond these bounds the cut keeps one token or all of them, and 2 ** mu would overflow.
        mu = min(max(self.mu + self._eta * (self._tau - surprise), -1000.0), 1000.0)
        self._trace.append((length, mu))

    def rewind(self, length: int) -> None:
        while self._trace and self._trace[-1][0] > length:
            self._trace.pop()
