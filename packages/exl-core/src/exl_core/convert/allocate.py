"""The best layouts under a budget of bits: a knapsack that takes one candidate of each matrix.

Lagrange's multiplier (the price of a bit) gives a lower bound for the error and a first solution
within the budget. What the bound leaves open is searched completely: a candidate that costs more
than the gap, at that price, is in no better solution, and few are not. Deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exl_core.convert.plan import Allocation, Candidate, LayerMeasurement, MatrixMeasurement, budget
from exl_core.errors import RequestError

MAX_STATES = 200_000
"""Partial solutions that are kept side by side; beyond them the worst are dropped. The gap of real
models takes a few thousand."""


def allocate(layers: Sequence[LayerMeasurement], bits: float) -> Allocation:
    """Least sum of errors within `bits` per weight of all layers together.

    RequestError where even the smallest layouts take more. Deterministic.
    """
    matrices = [matrix for layer in layers for matrix in layer.matrices]
    limit, numel = budget(layers, bits)
    choices = [_useful(matrix) for matrix in matrices]
    least = sum(options[0].bits for options in choices)
    if least > limit:
        raise RequestError(
            f"{bits} bits per weight are too few for this model",
            expected=f"at least {least / numel:.3f}, which the smallest layouts take",
            got=bits,
            next_step="Scales and the order of rows take their part too.",
        )
    chosen = _search(choices, limit)
    picked = [options[index] for options, index in zip(choices, chosen, strict=True)]
    return Allocation(
        layouts={m.name: c.layout for m, c in zip(matrices, picked, strict=True)},
        bits=sum(candidate.bits for candidate in picked),
        budget_bits=limit,
        numel=numel,
        error=sum(candidate.error for candidate in picked),
    )


def _useful(matrix: MatrixMeasurement) -> list[Candidate]:
    """Candidates in the order of their size, each better than all smaller ones."""
    useful: list[Candidate] = []
    for candidate in sorted(matrix.candidates, key=lambda c: (c.bits, c.error, c.layout)):
        if not useful or candidate.error < useful[-1].error:
            useful.append(candidate)
    return useful


class _Item(NamedTuple):
    """Of one matrix: bits int64 and errors float64 of its candidates."""

    bits: NDArray[np.int64]
    errors: NDArray[np.float64]

    def cheapest(self, price: float) -> int:
        return int(np.argmin(self.errors + price * self.bits))  # the smallest of equals


def _search(choices: Sequence[Sequence[Candidate]], limit: int) -> list[int]:
    items = [
        _Item(np.array([c.bits for c in options]), np.array([c.error for c in options]))
        for options in choices
    ]
    price = _price(items, limit)
    best = [item.cheapest(price) for item in items]
    if price == 0:
        return best
    best = _filled(items, best, limit)
    slack = [item.errors + price * item.bits for item in items]
    slack = [costs - costs.min() for costs in slack]  # what a candidate costs over the bound
    spent = sum(int(item.bits[i]) for item, i in zip(items, best, strict=True))
    gap = sum(float(costs[i]) for costs, i in zip(slack, best, strict=True))
    gap += price * (limit - spent)
    return _improved(items, slack, gap, price, limit) or best


def _price(items: Sequence[_Item], limit: int) -> float:
    """The smallest price of a bit at which the cheapest candidates fit; 0 if all best ones do."""

    def size(price: float) -> int:
        return sum(int(item.bits[item.cheapest(price)]) for item in items)

    if size(0.0) <= limit:
        return 0.0
    low, high = 0.0, 1.0
    while size(high) > limit:
        low, high = high, high * 16
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if size(middle) > limit:
            low = middle
        else:
            high = middle
    return high


def _filled(items: Sequence[_Item], start: Sequence[int], limit: int) -> list[int]:
    """While something fits, the step that gains most a bit."""
    chosen = list(start)
    left = limit - sum(int(item.bits[i]) for item, i in zip(items, chosen, strict=True))
    while True:
        steps = [
            (float(item.errors[now] - item.errors[j]) / int(item.bits[j] - item.bits[now]), -n, j)
            for n, (item, now) in enumerate(zip(items, chosen, strict=True))
            for j in range(now + 1, len(item.bits))
            if int(item.bits[j] - item.bits[now]) <= left
        ]
        if not steps:
            return chosen
        _, place, j = max(steps)
        left -= int(items[-place].bits[j] - items[-place].bits[chosen[-place]])
        chosen[-place] = j


def _improved(
    items: Sequence[_Item],
    slack: Sequence[NDArray[np.float64]],
    gap: float,
    price: float,
    limit: int,
) -> list[int] | None:
    """The best of all solutions over the bound by less than `gap`; None if there is none.

    A state is a choice for the items so far: its bits, and what it costs over the bound. Of two
    states, one that is neither smaller nor cheaper is dropped.
    """
    bits, costs = np.zeros(1, dtype=np.int64), np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for item, over in zip(items, slack, strict=True):
        usable = np.flatnonzero(over < gap)
        new_bits = (bits[:, None] + item.bits[usable]).ravel()
        new_costs = (costs[:, None] + over[usable]).ravel()
        parents = np.repeat(np.arange(len(bits)), len(usable))
        picks = np.tile(usable, len(bits))
        keep = np.flatnonzero(new_costs < gap)
        # What is paid for bits is part of the costs: so a state is judged by its error alone.
        errors = new_costs[keep] - price * new_bits[keep]
        order = keep[np.lexsort((errors, new_bits[keep]))]
        errors = new_costs[order] - price * new_bits[order]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], errors[:-1]]))
        order = order[errors < best_before]
        if len(order) > MAX_STATES:
            order = np.sort(order[np.argsort(new_costs[order], kind="stable")[:MAX_STATES]])
        bits, costs = new_bits[order], new_costs[order]
        history.append((parents[order], picks[order]))
        if not len(bits):
            return None
    total = np.where(bits <= limit, costs + price * (limit - bits), np.inf)
    place = int(np.argmin(total))
    if not total[place] < gap:
        return None
    chosen = []
    for parent, pick in reversed(history):
        chosen.append(int(pick[place]))
        place = int(parent[place])
    return chosen[::-1]
