"""Inverse frequencies of RoPE, compared with transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exl_core.arch.rope import inverse_frequencies, ntk_base
from exl_core.arch.spec import RopeConfig, RopeMethod

BASE, DIM, NATIVE = 10000.0, 64, 256
METHODS: dict[str, Any] = {
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {},
}


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
@pytest.mark.parametrize("kind", METHODS)
def test_scaled_frequencies_equal_transformers(kind: str, factor: float) -> None:
    extra = METHODS[kind]
    parameters = {"rope_type": kind, "rope_theta": BASE, "factor": factor, **extra}
    config = LlamaConfig(
        head_dim=DIM,
        max_position_embeddings=4096,
        rope_parameters={**parameters, "original_max_position_embeddings": NATIVE},
    )
    expected, expected_multiplier = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))

    ours, multiplier = inverse_frequencies(
        RopeConfig(
            base=BASE,
            rotary_dim=DIM,
            method=RopeMethod(kind),
            factor=factor,
            original_max_seq_len=NATIVE,
            **extra,
        )
    )

    torch.testing.assert_close(torch.tensor(ours), expected, rtol=1e-6, atol=0)
    assert multiplier == pytest.approx(expected_multiplier)


def test_alpha_divides_the_slowest_frequency_and_keeps_the_fastest() -> None:
    plain, _ = inverse_frequencies(RopeConfig(base=BASE, rotary_dim=DIM))
    scaled, _ = inverse_frequencies(RopeConfig(base=BASE, rotary_dim=DIM, alpha=4.0))
    assert scaled[0] == plain[0] == 1.0
    assert plain[-1] / scaled[-1] == pytest.approx(4.0)


def test_an_alpha_beyond_floats_gives_an_infinite_base() -> None:
    assert ntk_base(BASE, 1e300, DIM) == math.inf
    assert ntk_base(BASE, 4.0, 2) == BASE  # a dimension that the checks refuse
