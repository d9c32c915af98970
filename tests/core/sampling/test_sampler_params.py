"""Sampler settings are checked at construction."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams, TokenBias

NO_NUMBERS = (math.nan, math.inf, -math.inf, "1", True, 10**400)
NO_IDS = (3, "12", {-1}, {0.5}, {"a"}, {True}, {2**31}, {10**400})
HUGE = 10**400
"""An int that no float holds."""
BAD_BIASES: tuple[Any, ...] = (
    *({-1: 1.0}, {"a": 1.0}, {1.5: 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}, {(1,): 1.0}),
    *({2**31: 1.0}, {HUGE: 1.0}, {1: math.nan}, {1: math.inf}, {1: "x"}, {1: True}, {1: None}),
    *({1: 1e31}, {1: -1e31}, {1: HUGE}, {1: -HUGE}),
)
BAD = {
    "temperature": (-0.1, 101, None, *NO_NUMBERS),
    "temperature_last": (1, None, "yes"),
    "min_temp": (-0.1, 101, *NO_NUMBERS),
    "max_temp": (-0.1, 101, *NO_NUMBERS),
    "temp_exponent": (-0.1, 101, *NO_NUMBERS),
    "smoothing_factor": (-0.1, 101, *NO_NUMBERS),
    "smoothing_curve": (0.9, 101, None, *NO_NUMBERS),
    "top_k": (-1, 1.5, math.nan, "4", True),
    "top_p": (0, -0.5, 1.01, None, *NO_NUMBERS),
    "top_n_sigma": (-0.1, 101, *NO_NUMBERS),
    "top_a": (-0.1, 1.5, *NO_NUMBERS),
    "min_p": (-0.1, 1.5, *NO_NUMBERS),
    "tfs": (0, 1.01, *NO_NUMBERS),
    "typical": (0, 1.01, *NO_NUMBERS),
    "skew": (-21, 21, *NO_NUMBERS),
    "xtc_probability": (-0.1, 1.5, *NO_NUMBERS),
    "xtc_threshold": (-0.1, 1.5, *NO_NUMBERS),
    "xtc_protected": (None, *NO_IDS),
    "mirostat_tau": (-1, 101, *NO_NUMBERS),
    "mirostat_eta": (-0.1, 1.5, None, *NO_NUMBERS),
    "mirostat_version": (0, 3, 1.5, None, True),
    "repetition_penalty": (0, -1, 1e9, *NO_NUMBERS),
    "frequency_penalty": (-101, 101, *NO_NUMBERS),
    "presence_penalty": (-101, 101, *NO_NUMBERS),
    "penalty_range": (-1, 2.5, math.nan, True),
    "penalty_decay": (-1, 2.5, None, True),
    "dry_multiplier": (-0.1, 101, *NO_NUMBERS),
    "dry_base": (-0.1, 101, *NO_NUMBERS),
    "dry_allowed_length": (-1, 2.5, None),
    "dry_range": (-1, 2.5, None, 1, 20),
    "dry_max_ngram": (-1, 0, 1, 2.5, None),
    "dry_breakers": (None, *NO_IDS),
    "token_bias": (
        None,
        3,
        *BAD_BIASES,
    ),
    "allowed_tokens": (set(), *NO_IDS),
    "banned_tokens": (None, *NO_IDS),
    "cfg_scale": (-101, 101, *NO_NUMBERS),
    "seed": (-1, 2**63, 0.5, math.nan, True),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_out_of_range_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplerParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.what.startswith(name)
    assert caught.value.got is not None
    assert caught.value.expected


@pytest.mark.parametrize("bias", BAD_BIASES)
def test_a_token_bias_is_checked_at_construction(bias: Any) -> None:
    with pytest.raises(RequestError, match="token_bias is out of range"):
        TokenBias(bias)


@pytest.mark.parametrize(
    "key", ["-1", "+1", " 1", "1 ", "1_0", "01", "00", "1.0", "0x1", "\u0661", "", "a", "9" * 5000]
)
def test_token_ids_in_text_are_plain_decimal_digits(key: str) -> None:
    for make in (
        TokenBias.from_text,
        lambda bias: SamplerParams.from_mapping({"token_bias": bias}),
    ):
        with pytest.raises(RequestError, match="token_bias is out of range"):
            make({key: 1.0})
    assert TokenBias.from_text({"0": 1, "17": -2.5}) == {0: 1.0, 17: -2.5}


def test_a_number_too_long_to_print_is_refused_like_any_other() -> None:
    long = 10**5000
    for settings in ({"seed": long}, {"banned_tokens": {long}}, {"token_bias": {long: 1.0}}):
        with pytest.raises(RequestError, match="an integer of many digits"):
            SamplerParams(**settings)


def test_every_setting_is_checked() -> None:
    assert set(BAD) == {field.name for field in fields(SamplerParams)}


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplerParams(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=0)
    SamplerParams(temperature=100, top_p=1e-9, min_p=1, penalty_range=0, seed=2**63 - 1)
    SamplerParams(tfs=1e-9, typical=1, skew=-20, top_a=1, mirostat_tau=0, dry_range=21, cfg_scale=0)
    SamplerParams(token_bias={3: -math.inf}, allowed_tokens=frozenset({0, 2**31 - 1}))


def test_settings_are_immutable_values() -> None:
    bias, banned = {7: 1.5, 2: -1.0}, {4, 5}
    params = SamplerParams(token_bias=bias, banned_tokens=banned)  # type: ignore[arg-type]
    bias[7] = 9.0
    banned.add(6)
    same = SamplerParams(token_bias={2: -1.0, 7: 1.5}, banned_tokens=frozenset({4, 5}))
    assert params == same
    assert hash(params) == hash(same)
    assert params != replace(same, token_bias={2: -1.0})
    assert dict(params.token_bias) == {2: -1.0, 7: 1.5}
    assert eval(repr(params)) == params
    assert repr(params.token_bias) == repr(TokenBias({2: -1.0, 7: 1.5}))


def test_settings_that_leave_no_token_are_refused() -> None:
    with pytest.raises(RequestError, match="allowed_tokens"):
        SamplerParams(allowed_tokens=frozenset({1, 2}), banned_tokens=frozenset({1, 2, 3}))


def test_from_mapping_takes_lists_and_string_ids() -> None:
    params = SamplerParams.from_mapping(
        {"top_k": 5, "banned_tokens": [1, 2, 2], "token_bias": {"12": -1, 3: 2.0}}
    )
    assert params == SamplerParams(
        top_k=5, banned_tokens=frozenset({1, 2}), token_bias={12: -1, 3: 2.0}
    )
    assert SamplerParams.from_mapping({}) == SamplerParams()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("top-k", "top_k"),
        ("temprature", "temperature"),
        ("repetition_penality", "repetition_penalty"),
        ("dry_multiplyer", "dry_multiplier"),
    ],
)
def test_an_unknown_setting_is_reported_with_the_nearest_known_one(name: str, nearest: str) -> None:
    with pytest.raises(RequestError, match=f"{name}.*{nearest}"):
        SamplerParams.from_mapping({"top_p": 0.5, name: 1})


def test_from_mapping_checks_values() -> None:
    with pytest.raises(RequestError, match="token_bias"):
        SamplerParams.from_mapping({"token_bias": {"x": 1.0}})
    with pytest.raises(RequestError, match="top_p"):
        SamplerParams.from_mapping({"top_p": "0.5"})


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplerParams(), False),
        (SamplerParams(temperature=0), True),
        (SamplerParams(temperature=0.009), True),
        (SamplerParams(temperature=0.01), False),
        (SamplerParams(top_k=1), True),
        (SamplerParams(temperature=0, temperature_last=True), True),
        (SamplerParams(temperature=0, max_temp=2.0), True),
        # Dynamic temperature replaces the last temperature.
        (SamplerParams(temperature=0, temperature_last=True, max_temp=2.0), False),
    ],
)
def test_greedy_is_temperature_zero_or_top_k_one(params: SamplerParams, is_greedy: bool) -> None:
    assert params.is_greedy is is_greedy


def test_all_token_ids_of_the_settings_are_listed_by_name() -> None:
    assert not any(SamplerParams().named_ids.values())
    for name in ("xtc_protected", "dry_breakers", "banned_tokens", "allowed_tokens", "token_bias"):
        ids = {3: 1.0, 9: 1.0} if name == "token_bias" else {3, 9}
        named = SamplerParams(**{name: ids}).named_ids  # type: ignore[arg-type]
        assert {key: set(value) for key, value in named.items() if value} == {name: {3, 9}}
