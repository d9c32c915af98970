"""Sampling steps: comparable values that are pure functions from logits to logits.

A step takes float32 logits [vocab_size] and returns new ones; it never writes to its input. A
dropped token has the logit minus infinity. Each step sees the distribution that the previous steps
left. Ties are ordered by token id, lowest first, and sums run in float64 from the likeliest token
down, so that every step keeps the same tokens on every machine. Steps that depend on the history
are in `penalties.py`, those that depend on earlier samples in `feedback.py`. The kernel of
`ops.sample` runs the usual chain at once; tests hold it equal to these steps.
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
"""Top-p drops every token less likely than this."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide by `temperature`, after subtracting the largest logit so that nothing overflows."""

    temperature: float

    def __call__(self, logits: Tensor) -> Tensor:
        return (logits - logits.amax()) / self.temperature


@dataclass(frozen=True, slots=True)
class TopNSigma:
    """Keep tokens whose logit is at most `n` standard deviations below the largest logit.

    The deviation is that of all remaining tokens. A temperature does not change the result, because
    it scales logits and deviation alike. Source: top-n-sigma, arXiv 2411.07641.
    """

    n: float

    def __call__(self, logits: Tensor) -> Tensor:
        left = logits[logits > DROPPED].double()
        floor = left.amax() - self.n * left.std(correction=0)
        return logits.masked_fill(logits < floor, DROPPED)


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Logits fall with the square of their distance from the largest, times `factor`.

    A `curve` c other than 1 mixes square and cube of the distance: (3 - c) / 2 of the square and
    (c - 1) / 2 of the cube. Source of the formula: QuadraticSamplingLogitsProcessor of
    text-generation-webui.
    """

    factor: float
    curve: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        distance = logits.amax() - logits
        fall = distance.square() * self.factor
        if self.curve != 1.0:
            fall = fall * ((3.0 - self.curve) / 2.0 + (self.curve - 1.0) / 2.0 * distance)
        return -fall


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

    The token that would exceed `p` is dropped, and so is every token below 1e-6. The likeliest
    token is always kept.
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
    """Tail-free sampling: cut where descending probabilities have used `z` of their curvature.

    The curvature is the absolute second difference, normalized to sum 1. With fewer than three
    tokens there is none, and nothing is dropped.
    """

    z: float

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)[: count_kept(logits)]
        if len(order) < 3:
            return logits.clone()
        p = softmax(logits)[order]
        bend = (2 * p[1:-1] - p[:-2] - p[2:]).abs()
        # A straight line has no curvature: 0 / 0 is NaN, which exceeds nothing.
        exceeds = (bend / bend.sum()).cumsum(0) > self.z
        first = int(exceeds.int().argmax()) if bool(exceeds.any()) else len(bend)
        return drop_all_but(logits, order[: first + 1])


@dataclass(frozen=True, slots=True)
class Typical:
    """Keep the tokens whose surprise is nearest to the entropy, until they sum to `mass`.

    The token that reaches `mass` is kept.
    """

    mass: float

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)[: count_kept(logits)]
        p = softmax(logits)[order]
        surprise = -p.log()
        # A probability that is 0 in float64 would give 0 * inf = NaN; such a token sorts last.
        entropy = torch.where(p > 0, p * surprise, 0.0).sum()
        nearest = torch.sort((surprise - entropy).abs(), stable=True).indices
        sums = p[nearest].cumsum(0)
        is_kept = torch.ones(len(p), dtype=torch.bool)
        is_kept[1:] = sums[:-1] < self.mass
        return drop_all_but(logits, order[nearest[is_kept]])


@dataclass(frozen=True, slots=True)
class DynamicTemperature:
    """Temperature between `low` and `high`, by entropy relative to a flat distribution's.

    A temperature below 0.01 is greedy.
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
    """XTC (exclude top choices), as an expectation instead of a random event.

    Tokens of at least `threshold` count as top choices. With `probability` q, every top choice
    except the least likely one has its probability multiplied by 1 - q, and the removed mass goes
    to all other tokens in proportion. With fewer than two top choices nothing changes. `protected`
    tokens are never excluded.
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
    """Token ids, likeliest first, ties by id."""
    return torch.sort(logits, descending=True, stable=True).indices


def likeliest(probability: Tensor, count: int) -> Tensor:
    """The first `count` ids of `descending`, without those of probability 0."""
    bound = probability.topk(min(count, len(probability))).values[-1]
    few = ((probability >= bound) & (probability > 0)).nonzero().squeeze(1)
    return few[descending(probability[few])][:count]


def weights(logits: Tensor) -> Tensor:
    """Probabilities up to a common factor, float64; the likeliest token has 1.

    As in the kernels, a weight below the range of float32 is 0: the token cannot be sampled.
    """
    below = logits - logits.amax()
    return below.double().exp_().masked_fill_(below < WEIGHT_FLOOR, 0.0)


def softmax(logits: Tensor) -> Tensor:
    """Probabilities, float64."""
    weight = weights(logits)
    return weight / weight.sum()


def count_kept(logits: Tensor) -> int:
    """Number of tokens that are not dropped."""
    return int((logits > DROPPED).sum())


def drop_all_but(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.full_like(logits, DROPPED).index_copy_(0, ids, logits[ids])


def as_ids(token_ids: frozenset[int], vocab_size: int) -> Tensor:
    """Ids as a tensor, ascending, without ids outside the vocabulary."""
    inside = [token_id for token_id in sorted(token_ids) if token_id < vocab_size]
    return torch.tensor(inside, dtype=torch.int64)


def greedy(logits: Tensor) -> int:
    """The likeliest token; among ties the lowest id."""
    return int(logits.max(0).indices)


def draw(weight: Tensor, uniform: float) -> int:
    """First index at which the running sum of the weights exceeds `uniform` times the total.

    `uniform` is in [0, 1). Sums are float64: over a large vocabulary, rounding to float32 would
    make the rarest tokens unreachable.
    """
    running = weight.double().cumsum(0)
    index = int(torch.searchsorted(running, uniform * float(running[-1]), right=True))
    # If rounding leaves no such index, the last token of nonzero weight.
    return index if index < len(running) else int(weight.nonzero()[-1])


def skewed(uniform: float, skew: float) -> float:
    """Transform of the random number; tokens are then drawn from the likeliest down.

    A `skew` above 0 favors rare tokens.
    """
    return min(math.pow(uniform, math.exp(-skew)), math.nextafter(1.0, 0.0))


def skewed_shares(probability: Tensor, skew: float) -> Tensor:
    """Probability that each token is drawn with a skewed random number: float64."""
    order = descending(probability)
    edges = probability[order].double().cumsum(0).clamp_(max=1.0) ** math.exp(skew)
    return torch.zeros_like(edges).index_copy_(0, order, edges.diff(prepend=edges.new_zeros(1)))
