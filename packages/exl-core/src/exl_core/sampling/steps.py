"""The steps of sampling: pure functions with a value, from logits to logits.

A step takes float32 logits [vocab_size] and returns new ones, never writing to its input. A token
that is dropped has minus infinity. Equal logits are ordered by token id, lowest first, so that
every step keeps the same tokens on every machine. `fuse.py` does the usual chain of steps at once
and is proved equal to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DROPPED = -math.inf
LogitStep = Callable[[Tensor], Tensor]

_BLOCK = 512  # of `draw`: a sum per block finds the block, then only that one is searched


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Divide the positive logits of these tokens by `penalty`, multiply the negative ones.

    How often a token occurred makes no difference.
    """

    penalty: float
    token_ids: tuple[int, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        ids = torch.tensor(self.token_ids, dtype=torch.int64)
        return penalize(logits.clone(), ids, self.penalty)


@dataclass(frozen=True, slots=True)
class Ban:
    """Drop these tokens."""

    token_ids: frozenset[int]

    def __call__(self, logits: Tensor) -> Tensor:
        ids = torch.tensor(sorted(self.token_ids), dtype=torch.int64)
        return logits.index_fill(0, ids, DROPPED)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide by `temperature`, relative to the largest logit, so that nothing overflows."""

    temperature: float

    def __call__(self, logits: Tensor) -> Tensor:
        return (logits - logits.amax()) / self.temperature


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the `k` likeliest tokens."""

    k: int

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)
        return logits.index_fill(0, order[self.k :], DROPPED)


@dataclass(frozen=True, slots=True)
class TopP:
    """Keep the likeliest tokens until their probability reaches `p`.

    The token that reaches it is kept; so there is always at least one.
    """

    p: float

    def __call__(self, logits: Tensor) -> Tensor:
        order = descending(logits)
        weight = weights(logits[order], logits.amax()).double()
        before = weight.cumsum(0) - weight
        return logits.index_fill(0, order[before >= self.p * weight.sum()], DROPPED)


@dataclass(frozen=True, slots=True)
class MinP:
    """Keep tokens at least `p` times as likely as the likeliest one."""

    p: float

    def __call__(self, logits: Tensor) -> Tensor:
        floor = logits.amax() + math.log(self.p)
        return logits.masked_fill(logits < floor, DROPPED)


def penalize(logits: Tensor, token_ids: Tensor, penalty: float) -> Tensor:
    """`RepetitionPenalty` in place. A repeated id is written twice with the same value."""
    chosen = logits[token_ids]
    logits[token_ids] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    return logits


def descending(logits: Tensor) -> Tensor:
    """Token ids, likeliest first, equals by id."""
    return torch.sort(logits, descending=True, stable=True).indices


def weights(logits: Tensor, largest: Tensor) -> Tensor:
    """Probabilities but for a common factor."""
    return (logits - largest).exp_()


def greedy(logits: Tensor) -> int:
    """The likeliest token; the lowest id of several."""
    return int(logits.max(0).indices)


def draw(weight: Tensor, uniform: float) -> int:
    """Index of the token at which the running sum of the weights passes `uniform` of the total.

    `uniform` lies in [0, 1). Sums are float64: over a large vocabulary the rounding of float32
    would make the rarest tokens unreachable.
    """
    count = len(weight)
    whole = count // _BLOCK * _BLOCK
    if whole > _BLOCK:
        sums = weight[:whole].view(-1, _BLOCK).sum(1, dtype=torch.float64)
        sums = torch.cat((sums, weight[whole:].sum(dtype=torch.float64)[None]))
        running = sums.cumsum(0)
        target = uniform * float(running[-1])
        block = _first_above(running, sums, target)
        start = block * _BLOCK
        rest = target - float(running[block] - sums[block])
        part = weight[start : min(start + _BLOCK, count)].double()
        return start + _first_above(part.cumsum(0), part, rest)
    part = weight.double()
    running = part.cumsum(0)
    return _first_above(running, part, uniform * float(running[-1]))


def _first_above(running: Tensor, weight: Tensor, target: float) -> int:
    """First index whose running sum is above `target`; where rounding leaves none, the last > 0."""
    index = int(torch.searchsorted(running, target, right=True))
    if index < len(running):
        return index
    return int(weight.nonzero()[-1])
