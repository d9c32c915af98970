"""Orders of samplers: the engine's settings that do the same, or a refusal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_cli.server.errors import ApiError
from exl_cli.server.sampler_order import (
    SamplerOrder,
    read_numbers,
    read_priority,
    read_samplers,
)
from exl_core.sampling.chain import steps_for
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.steps import MinP, Temperature, TopK, TopNSigma, TopP, Typical

STEPS: dict[str, Callable[[float], Any]] = {
    "top_k": lambda value: TopK(int(value)),
    "top_p": TopP,
    "min_p": MinP,
    "typical": Typical,
    "top_n_sigma": TopNSigma,
    "temperature": Temperature,
}
VALUES = {
    **{"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    **{"typical": 0.7, "top_n_sigma": 1.5, "temperature": 1.7},
}


def in_turn(names: tuple[str, ...], logits: Tensor) -> Tensor:
    """Probabilities by the steps in the order of a request."""
    for name in names:
        logits = STEPS[name](VALUES[name])(logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_accepted_orders_give_the_probabilities_of_that_order(size: int) -> None:
    rng = torch.Generator().manual_seed(20 + size)
    accepted = refused = 0
    for names in itertools.permutations(STEPS, size):
        settings = {name: VALUES[name] for name in names}
        logits = torch.randn(200, generator=rng) * 3
        exact = in_turn(names, logits)
        try:
            values = SamplerOrder("samplers", names, is_complete=True).applied(settings)
        except ApiError as error:
            assert error.code == "unsupported_parameter"
            refused += 1
            continue
        accepted += 1
        found = logits
        for step in steps_for(SamplerParams(**values), ()):
            found = step(found)
        torch.testing.assert_close(found.softmax(-1), exact, atol=1e-6, rtol=1e-5)
    assert accepted and refused


def test_samplers_that_are_not_listed_are_off_in_llama_cpp_only() -> None:
    given = {"top_p": 0.9, "top_k": 40, "temperature": 0.7, "repetition_penalty": 1.1}
    order = read_samplers(["top_k"])
    assert order is not None
    found = SamplerParams(**order.applied(given))
    assert found == SamplerParams(top_k=40)
    other = read_priority("top_k\ntop_p")
    assert other is not None and other.applied(given) == given


LLAMA_CPP = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"]


@pytest.mark.parametrize(
    ("order", "settings", "is_last"),
    [
        (read_samplers([*LLAMA_CPP, "temperature"]), {"top_p": 0.9, "temperature": 0.7}, True),
        (read_samplers("edskypmxt"), {"min_p": 0.1, "temperature": 0.7}, True),
        (read_samplers(["temperature", "top_p"]), {"top_p": 0.9, "temperature": 0.7}, False),
        (read_numbers([6, 0, 1, 3, 4, 2, 5]), {"top_p": 0.9, "temperature": 0.7}, True),
        (read_numbers([6, 5, 0, 2]), {"top_p": 0.9, "top_k": 5, "temperature": 0.7}, False),
        (read_priority(["temperature", "top_p"]), {"top_p": 0.9, "max_temp": 0.0}, None),
        (read_priority(["temperature"]), {"temperature": 0.0, "top_p": 0.5}, None),
    ],
)
def test_place_of_the_temperature(
    order: SamplerOrder | None, settings: dict[str, Any], is_last: bool | None
) -> None:
    assert order is not None
    assert order.applied(settings).get("temperature_last") == is_last


@pytest.mark.parametrize(
    ("order", "settings", "said"),
    [
        (read_samplers([*LLAMA_CPP]), {"typical": 0.9, "top_p": 0.9}, "typical comes after top_p"),
        (
            read_samplers(["top_p", "temperature", "min_p"]),
            {"top_p": 0.9, "min_p": 0.1, "temperature": 0.7},
            "before or after all of min_p, top_p",
        ),
        (
            read_samplers(["xtc", "temperature"]),
            {"xtc_probability": 0.5, "temperature": 0.7},
            "xtc comes after the temperature",
        ),
        (
            read_priority(["dynamic_temperature", "top_p"]),
            {"top_p": 0.9, "min_temp": 0.5, "max_temp": 1.5},
            "the dynamic temperature comes after",
        ),
        (
            read_priority(["temperature", "quadratic_sampling"]),
            {"smoothing_factor": 0.2, "temperature": 0.7},
            "smoothing comes before",
        ),
        (
            read_samplers(["top_k", "temperature", "penalties"]),
            {"top_k": 1, "repetition_penalty": 1.2, "dry_multiplier": 0.8},
            "penalties comes first",
        ),
        (
            read_priority(["temperature", "dry"]),
            {"temperature": 0.5, "dry_multiplier": 0.8},
            "dry comes first",
        ),
    ],
)
def test_other_orders_are_refused_by_name(
    order: SamplerOrder | None, settings: dict[str, Any], said: str
) -> None:
    assert order is not None
    with pytest.raises(ApiError, match=said) as caught:
        order.applied(settings)
    assert caught.value.param == order.field


@pytest.mark.parametrize("given", [5, "qz", ["nothing"], [1], [None], ["top_k"] * 65])
def test_lists_of_something_else_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"expected|known"):
        read_samplers(given)
    with pytest.raises(ValueError, match="expected"):
        read_numbers([7])
    assert read_samplers([]) is None
