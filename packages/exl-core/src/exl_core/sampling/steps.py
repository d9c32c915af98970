"""The steps of sampling: pure functions with a value, from logits to logits.

A step takes float32 logits [vocab_size] and returns new ones, never writing to its input. A token
that is dropped has minus infinity. Each step sees the distribution of what the steps before it
left. Equal logits are ordered by token id, lowest first, and sums run in float64 from the likeliest
token down, so that every step keeps the same tokens on every machine. What depends on the history
is in `penalties.py`, what depends on earlier draws in `feedback.py`. The kernel of `ops.sample`
does the usual chain of steps at once and is proved equal to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DROPPED = -math.inf
LogitStep = Callable[[Tensor], Tensor]

WEIGHT_FLOOR = -87.33654
TOP_P_FLOOR = 1e-6
"""Tokens less likely than this are no part of any nucleus."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide by `temperature`, relative to the largest logit, so that nothing overflows."""

    temperature: float

    def __call__(self, logits: Tensor) -> Tensor:
        return (logits - logits.amax()) / self.temperature


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Logits fall with the square of their distance from the largest, times `factor`."""

    factor: float

    def __call__(self, logits: Tensor) -> Tensor:
        return (logits - logits.amax()).square() * -self.factor


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the `k` likeliest tokens."""

    k: int

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)
        return logits.index_fill(0, order[self.k :], DROPPED)


@dataclass(frozen=True, slots=True)
class TopP:
    """Keep the longest run of the likeliest tokens whose probabilities sum to at most `p`.

    The token that would exceed it is dropped, and so is every one below 1e-6; the likeliest stays.
    """

    p: float

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)
        weight = weights(logits)[order]
        total = weight.sum()
        is_kept = (weight.cumsum(0) <= self.p * total) & (weight >= TOP_P_FLOOR * total)
        is_kept[0] = True
        return logits.index_fill(0, order[~is_kept], DROPPED)


@dataclass(frozen=True, slots=True)
class TopA:
    """Keep tokens with at least `a` times the square of the largest probability."""

    a: float

    def __call__(self, logits: Tensor) -> Tensor:
        probability = softmax(logits)
        floor = self.a * probability.amax().square()
        return logits.masked_fill(probability < floor, DROPPED)


@dataclass(frozen=True, slots=True)
class MinP:
    """Keep tokens at least `p` times as likely as the likeliest one."""

    p: float

    def __call__(self, logits: Tensor) -> Tensor:
        below = (logits - logits.amax()).double()
        return logits.masked_fill(below < math.log(self.p), DROPPED)


@dataclass(frozen=True, slots=True)
class TailFree:
    """Cut where the curve of descending probabilities has done `z` of its bending.

    With fewer than three tokens there is no curve.
    """

    z: float

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)[: count_kept(logits)]
        if len(order) < 3:
            return logits.clone()
        p = softmax(logits)[order]
        bend = (2 * p[1:-1] - p[:-2] - p[2:]).abs()
        # A straight line bends nowhere; 0 / 0 exceeds nothing.
        exceeds = (bend / bend.sum()).cumsum(0) > self.z
        first = int(exceeds.int().argmax()) if bool(exceeds.any()) else len(bend)
        return drop_all_but(logits, order[: first + 1])


@dataclass(frozen=True, slots=True)
class Typical:
    """Keep the tokens whose surprise is nearest to the entropy, until they sum to `mass`.

    The token that reaches it is kept.
    """

    mass: float

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)[: count_kept(logits)]
        p = softmax(logits)[order]
        surprise = -p.log()
        # What is so rare that its probability is 0 in float64 is last, not undefined.
        entropy = torch.where(p > 0, p * surprise, 0.0).sum()
        nearest = torch.sort((surprise - entropy).abs(), stable=True).indices
        sums = p[nearest].cumsum(0)
        is_kept = torch.ones(len(p), dtype=torch.bool)
        is_kept[1:] = sums[:-1] < self.mass
        return drop_all_but(logits, order[nearest[is_kept]])


@dataclass(frozen=True, slots=True)
class DynamicTemperature:
    """A temperature from `low` to `high` by the entropy, relative to that of a flat distribution.

    Below 0.01 it is greedy.
    """

    low: float
    high: float
    exponent: float

    def __call__(self, logits: Tensor) -> Tensor:
        count = count_kept(logits)
        if count < 2:
            return logits.clone()
        p = softmax(logits)
        entropy = -float(torch.where(p > 0, p * p.log(), 0.0).sum())
        share = min(max(entropy / math.log(count), 0.0), 1.0)
        temperature = self.low + (self.high - self.low) * share**self.exponent
        return TopK(1)(logits) if temperature < 0.01 else Temperature(temperature)(logits)


@dataclass(frozen=True, slots=True)
class ExcludeTop:
    """XTC: now and then all of the likeliest tokens but the last are excluded.

    As an expectation, not by chance: with `probability` q, each token above `threshold` but the
    least likely of them counts 1 - q times, and the mass goes to all others. Fewer than two such
    tokens, and nothing happens. `protected` tokens are never excluded.
    """

    probability: float
    threshold: float
    protected: frozenset[int] = frozenset()

    def __call__(self, logits: Tensor) -> Tensor:
        p = softmax(logits)
        likeliest = ((p >= self.threshold) & (p > 0)).nonzero().squeeze(1)
        likeliest = likeliest[descending(logits[likeliest])]
        if self.protected:
            is_open = ~torch.isin(likeliest, as_ids(self.protected, len(logits)))
            likeliest = likeliest[is_open]
        excluded = likeliest[:-1]
        if len(excluded) == 0:
            return logits.clone()
        rest = p.index_fill(0, excluded, 0.0).sum()
        factor = torch.ones_like(p) + self.probability * p[excluded].sum() / rest
        factor[excluded] = 1.0 - self.probability
        return (logits.double() + factor.log()).float()


def descending(logits: Tensor) -> Tensor:
    """Token ids, likeliest first, equals by id."""
    return torch.sort(logits, descending=True, stable=True).indices


def likeliest(probability: Tensor, count: int) -> Tensor:
    """The first `count` of `descending`, without those of probability 0."""
    bound = probability.topk(min(count, len(probability))).values[-1]
    few = ((probability >= bound) & (probability > 0)).nonzero().squeeze(1)
    return few[descending(probability[few])][:count]


def weights(logits: Tensor) -> Tensor:
    """Probabilities but for a common factor, float64; the likeliest token has 1.

    As in the kernels, what is below the range of float32 is 0: it cannot be drawn.
    """
    below = logits - logits.amax()
    return below.double().exp_().masked_fill_(below < WEIGHT_FLOOR, 0.0)


def softmax(logits: Tensor) -> Tensor:
    """Probabilities, float64."""
    weight = weights(logits)
    return weight / weight.sum()


def count_kept(logits: Tensor) -> int:
    """How many tokens are not dropped."""
    return int((logits > DROPPED).sum())


def drop_all_but(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.full_like(logits, DROPPED).index_copy_(0, ids, logits[ids])


def as_ids(token_ids: frozenset[int], vocab_size: int) -> Tensor:
    """As a tensor, ascending, without those that lie outside the vocabulary."""
    inside = [token_id for token_id in sorted(token_ids) if token_id < vocab_size]
    return torch.tensor(inside, dtype=torch.int64)


def greedy(logits: Tensor) -> int:
    """The likeliest token; the lowest id of several."""
    return int(logits.max(0).indices)


def draw(weight: Tensor, uniform: float) -> int:
    """Index of the token at which the running sum of the weights passes `uniform` of the total.

    `uniform` lies in [0, 1). Sums are float64: over a large vocabulary the rounding of float32
    would make the rarest tokens unreachable.
    """
    running = weight.double().cumsum(0)
    index = int(torch.searchsorted(running, uniform * float(running[-1]), right=True))
    # Where rounding leaves none, the last that can come at all.
    return index if index < len(running) else int(weight.nonzero()[-1])


def skewed(uniform: float, skew: float) -> float:
    """The number to draw with from the likeliest token down: above 0, rare tokens gain."""
    return min(math.pow(uniform, math.exp(-skew)), math.nextafter(1.0, 0.0))


def skewed_shares(probability: Tensor, skew: float) -> Tensor:
    """How likely each token is drawn with a skewed number: float64."""
    order = descending(probability)
    edges = probability[order].double().cumsum(0).clamp_(max=1.0) ** math.exp(skew)
    return torch.zeros_like(edges).index_copy_(0, order, edges.diff(prepend=edges.new_zeros(1)))
