"""Mirostat: a cut that moves so that sampled tokens have a given mean surprise in bits.

Source: arXiv 2007.14966. Version 1 is its algorithm 1 (`ZipfCut`), version 2 its algorithm 2
(`SurpriseCut`). Both move the cut by the surprise of each sampled token. The cut itself is a step
with a value. The moving state is one object per sampler; it is not part of
the settings, which many requests may share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.sampling.steps import DROPPED, TopK, count_kept, greedy, softmax

_ZIPF_TOKENS = 100
"""Number of likeliest tokens that the exponent is estimated from, as in the paper."""


@dataclass(frozen=True, slots=True)
class SurpriseCut:
    """Drop tokens whose surprise exceeds `mu` bits; the likeliest token is kept."""

    mu: float

    def __call__(self, logits: Tensor) -> Tensor:
        is_dropped = softmax(logits) < 2.0**-self.mu
        is_dropped[greedy(logits)] = False
        return logits.masked_fill(is_dropped, DROPPED)


@dataclass(frozen=True, slots=True)
class ZipfCut:
    """Keep the likeliest tokens, as many as give a Zipf distribution a surprise of `mu` bits.

    The exponent is the least-squares estimate from the 100 likeliest tokens. The distribution has
    as many tokens as remain.
    """

    mu: float

    def __call__(self, logits: Tensor) -> Tensor:
        count = count_kept(logits)
        if count < 2:
            return logits.clone()
        return TopK(min(max(self._size(logits, count), 1), count))(logits)

    def _size(self, logits: Tensor, count: int) -> int:
        """k = (e 2^mu / (1 - count^-e))^(1/s), where e = s - 1, limited to `count`."""
        largest = logits.double().topk(min(_ZIPF_TOKENS, count)).values
        rank = torch.arange(1, len(largest) + 1, dtype=torch.float64)
        steps = rank.log().diff()
        exponent = float((steps * -largest.diff()).sum() / steps.square().sum())
        excess = exponent - 1.0
        # e / (1 - count^-e); near e = 0, where both are 0, its limit 1 / ln(count).
        ratio = excess * math.log(count)
        share = 1.0 if abs(ratio) < 1e-9 else ratio / -math.expm1(-ratio)
        log_size = self.mu * math.log(2.0) + math.log(share / math.log(count))
        if log_size >= exponent * math.log(count):
            return count
        return 1 if log_size <= 0.0 else int(math.exp(log_size / exponent))


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

    def set_rate(self, eta: float) -> None:
        """Change the learning rate from the next token on."""
        self._eta = eta

    def accept(self, length: int, probability: float) -> None:
        """Record a token of this final probability, which made the history `length` long."""
        surprise = -math.log2(probability)
        # Beyond these bounds the cut keeps one token or all of them, and 2 ** mu would overflow.
        mu = min(max(self.mu + self._eta * (self._tau - surprise), -1000.0), 1000.0)
        self._trace.append((length, mu))

    def rewind(self, length: int) -> None:
        while self._trace and self._trace[-1][0] > length:
            self._trace.pop()
