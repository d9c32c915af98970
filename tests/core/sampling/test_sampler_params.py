"""Sampler settings are checked where they are made."""

from __future__ import annotations

import math

import pytest

from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams

BAD = {
    "temperature": (-0.1, math.nan, math.inf, -math.inf, 101, "1", None, True),
    "top_k": (-1, 1.5, math.nan, "4", True),
    "top_p": (0, -0.5, 1.01, math.nan, math.inf, None),
    "min_p": (-0.1, 1.5, math.nan, math.inf),
    "repetition_penalty": (0, -1, math.nan, math.inf, 1e9),
    "repetition_range": (0, -1, 2.5, math.nan),
    "seed": (-1, 2**63, 0.5, math.nan, True),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_out_of_range_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplerParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.what.startswith(name)
    assert caught.value.got == repr(value)
    assert caught.value.expected


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplerParams(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=0)
    SamplerParams(temperature=100, top_p=1e-9, min_p=1, repetition_range=1, seed=2**63 - 1)


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplerParams(), False),
        (SamplerParams(temperature=0), True),
        (SamplerParams(temperature=0.009), True),
        (SamplerParams(temperature=0.01), False),
        (SamplerParams(top_k=1), True),
    ],
)
def test_greedy_is_temperature_zero_or_top_k_one(params: SamplerParams, is_greedy: bool) -> None:
    assert params.is_greedy is is_greedy
