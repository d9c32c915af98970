"""What a request may ask of the sampler, checked. No torch: requests are made without it.

The steps run in this order, whatever the order of the arguments: repetition penalty, temperature,
top-k, top-p, min-p (`steps.py` has the formulas). The defaults sample the model's own distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from exl_core.errors import RequestError

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy: dividing by them is choosing the likeliest token."""


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """Settings of one request's sampler.

    temperature         0 (and anything below 0.01) is greedy; 1 leaves the distribution alone
    top_k               keep the k likeliest tokens; 0 is off, 1 is greedy
    top_p               keep the likeliest tokens up to this much probability; 1 is off
    min_p               keep tokens at least this many times as likely as the likeliest; 0 is off
    repetition_penalty  divides the logits of tokens that occurred (multiplies negative ones)
    repetition_range    how many of the latest tokens count, prompt included; None is all of them
    seed                same seed, same tokens; None draws a seed
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_range: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0)
        _check_float("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.repetition_range is not None:
            _check_int("repetition_range", self.repetition_range, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


def _check_float(
    name: str, value: object, low: float, high: float, *, is_low_open: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and isinstance(value, int | float) and math.isfinite(value):
        is_above = value > low if is_low_open else value >= low
        if is_above and value <= high:
            return
    span = f"above {low:g}, at most {high:g}" if is_low_open else f"{low:g} to {high:g}"
    raise RequestError(f"{name} is out of range", where="sampler", expected=span, got=repr(value))


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and isinstance(value, int) and low <= value and (high is None or value <= high):
        return
    span = f"a whole number from {low}" + ("" if high is None else f" to {high}")
    raise RequestError(f"{name} is out of range", where="sampler", expected=span, got=repr(value))
