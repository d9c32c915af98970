"""Choice of one layout per matrix with the least total error within a bit budget (a knapsack).

A Lagrange multiplier, the price of a bit, gives a lower bound for the error and a first solution
within the budget. The gap between the two is then searched exhaustively. A candidate that costs, at
this price, more than the gap above its matrix's best candidate cannot be in a better solution. Few
candidates remain. The result is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exl_core.convert.plan import Allocation, Candidate, LayerMeasurement, MatrixMeasurement, budget
from exl_core.errors import RequestError

MAX_STATES = 200_000
"""Most partial solutions that the search keeps. Beyond it, those with the highest costs are
dropped. The gap of real models takes a few thousand."""


def allocate(layers: Sequence[LayerMeasurement], bits: float) -> Allocation:
    """Chooses the layouts with the least sum of errors within `bits` per weight over all layers.

    Raises RequestError if even the smallest layouts take more. Deterministic.
    """
    matrices = [matrix for layer in layers for matrix in layer.matrices]
    limit_bits, numel = budget(layers, bits)
    choices = [_pareto_optimal(matrix) for matrix in matrices]
    minimum_bits = sum(options[0].bits for options in choices)
    if minimum_bits > limit_bits:
        raise RequestError(
            f"{bits} bits per weight are too few for this model",
            expected=f"at least {minimum_bits / numel:.3f}, which the smallest layouts take",
            got=bits,
            next_step="Scales and the order of rows take their part too.",
        )
    chosen = _search(choices, limit_bits)
    picked = [options[index] for options, index in zip(choices, chosen, strict=True)]
    return Allocation(
        layouts={m.name: c.layout for m, c in zip(matrices, picked, strict=True)},
        bits=sum(candidate.bits for candidate in picked),
        budget_bits=limit_bits,
        numel=numel,
        error=sum(candidate.error for candidate in picked),
    )


def _pareto_optimal(matrix: MatrixMeasurement) -> list[Candidate]:
    """Candidates in order of size, each with a smaller error than all smaller candidates."""
    optimal: list[Candidate] = []
    for candidate in sorted(matrix.candidates, key=lambda c: (c.bits, c.error, c.layout)):
        if not optimal or candidate.error < optimal[-1].error:
            optimal.append(candidate)
    return optimal


class _Item(NamedTuple):
    """Candidates of one matrix in order of size: bits int64 [C] and errors float64 [C]."""

    bits: NDArray[np.int64]
    errors: NDArray[np.float64]

    def cheapest(self, price: float) -> int:
        return int(np.argmin(self.errors + price * self.bits))  # the smallest, if equal


def _search(choices: Sequence[Sequence[Candidate]], limit_bits: int) -> list[int]:
    items = [
        _Item(np.array([c.bits for c in options]), np.array([c.error for c in options]))
        for options in choices
    ]
    price = _bit_price(items, limit_bits)
    best = [item.cheapest(price) for item in items]
    if price == 0:
        return best
    best = _fill_greedily(items, best, limit_bits)
    excess = [item.errors + price * item.bits for item in items]
    excess = [costs - costs.min() for costs in excess]  # above the bound
    spent = sum(int(item.bits[i]) for item, i in zip(items, best, strict=True))
    gap = sum(float(costs[i]) for costs, i in zip(excess, best, strict=True))
    gap += price * (limit_bits - spent)
    return _search_within_gap(items, excess, gap, price, limit_bits) or best


def _bit_price(items: Sequence[_Item], limit_bits: int) -> float:
    """Smallest price of a bit at which the cheapest candidates fit into the limit.

    It is 0 if the candidates with the least errors fit.
    """

    def size(price: float) -> int:
        return sum(int(item.bits[item.cheapest(price)]) for item in items)

    if size(0.0) <= limit_bits:
        return 0.0
    low, high = 0.0, 1.0
    while size(high) > limit_bits:
        low, high = high, high * 16
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if size(middle) > limit_bits:
            low = middle
        else:
            high = middle
    return high


def _fill_greedily(items: Sequence[_Item], start: Sequence[int], limit_bits: int) -> list[int]:
    """Spends the remaining bits: repeats the step that saves most error per bit, while one fits.

    Among equal steps, that of the first matrix is taken.
    """
    chosen = list(start)
    remaining_bits = limit_bits - sum(
        int(item.bits[i]) for item, i in zip(items, chosen, strict=True)
    )
    while True:
        steps = [
            (
                float(item.errors[current] - item.errors[j])
                / int(item.bits[j] - item.bits[current]),
                -n,
                j,
            )
            for n, (item, current) in enumerate(zip(items, chosen, strict=True))
            for j in range(current + 1, len(item.bits))
            if int(item.bits[j] - item.bits[current]) <= remaining_bits
        ]
        if not steps:
            return chosen
        _, negated, j = max(steps)
        n = -negated
        remaining_bits -= int(items[n].bits[j] - items[n].bits[chosen[n]])
        chosen[n] = j


def _search_within_gap(
    items: Sequence[_Item],
    excess: Sequence[NDArray[np.float64]],
    gap: float,
    price: float,
    limit_bits: int,
) -> list[int] | None:
    """Best of all solutions that exceed the bound by less than `gap`; None if there is none.

    A state is a choice of candidates for the items so far, represented by its bits and its cost
    above the bound. A state is dropped if another one has neither more bits nor a larger error.
    """
    bits, costs = np.zeros(1, dtype=np.int64), np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for item, excess_costs in zip(items, excess, strict=True):
        usable = np.flatnonzero(excess_costs < gap)
        new_bits = (bits[:, None] + item.bits[usable]).ravel()
        new_costs = (costs[:, None] + excess_costs[usable]).ravel()
        parents = np.repeat(np.arange(len(bits)), len(usable))
        picks = np.tile(usable, len(bits))
        keep = np.flatnonzero(new_costs < gap)
        # Costs include the price of the bits. Subtract it to compare states by their errors alone.
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
    total = np.where(bits <= limit_bits, costs + price * (limit_bits - bits), np.inf)
    state = int(np.argmin(total))
    if not total[state] < gap:
        return None
    chosen = []
    for parent, pick in reversed(history):
        chosen.append(int(pick[state]))
        state = int(parent[state])
    return chosen[::-1]
