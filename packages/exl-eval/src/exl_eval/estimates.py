"""Means with standard errors, and percentiles, of values per position."""

from __future__ import annotations

import math

from torch import Tensor


def mean_and_error(values: Tensor) -> tuple[float, float | None]:
    """Mean of float64 [n], and its standard error sqrt((mean(x^2) - mean(x)^2) / (n - 1)).

    The standard error of a single value is None."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(float((values - mean).square().mean()) / (len(values) - 1))


def percentiles(values: Tensor, *percents: float) -> list[float]:
    """Percentiles of float64 [n], interpolated between neighbors; 50 is the median."""
    ordered = values.sort().values
    found = []
    for percent in percents:
        place = percent / 100 * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        low_value, high_value = float(ordered[low]), float(ordered[high])
        found.append(low_value + (place - low) * (high_value - low_value))
    return found
