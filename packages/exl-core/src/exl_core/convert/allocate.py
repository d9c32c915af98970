"""The best layouts under a budget of bits: a knapsack with one item of each matrix."""

from __future__ import annotations

from collections.abc import Sequence

from exl_core.convert.plan import Allocation, LayerMeasurement


def allocate(layers: Sequence[LayerMeasurement], bits: float) -> Allocation:
    """Least sum of errors within `bits` per weight of all layers together.

    RequestError where even the smallest layouts take more. Deterministic.
    """
    raise NotImplementedError
