"""Limits on the number of values in a long body, which are counted in steps, outside of strings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_cli.server import bodies
from exl_cli.server.errors import ApiError
from support.scripted import reply_with
from support.server import error_of, running, scripted_runtime

TEXTS = st.text(alphabet='",:[]{}\\\na\ud800é', max_size=8)
VALUES = st.recursive(
    st.integers() | TEXTS | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Number of commas, of lists and objects, and of fields in a value."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    own = (max(len(value) - 1, 0), 1, len(value) if isinstance(value, dict) else 0)
    commas, containers, keys = map(sum, zip(own, *map(counts, inner), strict=True))
    return commas, containers, keys


def refusal(data: bytes, ctx_size: int = 0) -> ApiError | None:
    try:
        bodies.check_structure(data, ctx_size)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("which", [0, 1, 2], ids=["values", "containers", "keys"])
def test_values_outside_of_strings_are_counted_exactly(
    monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    limits = ("MAX_VALUES", "MAX_CONTAINERS", "MAX_KEYS")

    @settings(max_examples=100, deadline=None)
    @given(VALUES, st.integers(1, 9))
    def check(value: Any, step: int) -> None:
        data = json.dumps(value).encode()
        found = counts(value)
        with monkeypatch.context() as patch:
            patch.setattr(bodies, "_STEP_BYTES", step)
            patch.setattr(bodies, limits[which], found[which])
            assert refusal(data) is None
            if found[which]:
                patch.setattr(bodies, limits[which], found[which] - 1)
                assert refusal(data) is not None

    check()


def test_longer_context_allows_more_token_ids() -> None:
    data = json.dumps({"prompt": [1] * (bodies.MAX_VALUES + 10)}).encode()
    refused = refusal(data)
    assert refused is not None and refused.code == "context_length_exceeded"
    assert refusal(data, ctx_size=bodies.MAX_VALUES + 10) is None


LONG = "a" * bodies.LONG_BYTES


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (json.dumps({"prompt": "Q", "user": LONG}), 200, None),
        (json.dumps({"prompt": "Q", "user": LONG, "n": "x"}), 400, "invalid_value"),
        (json.dumps({"prompt": "Q", "user": LONG, "x": 1}), 200, None),
        (json.dumps({"prompt": "Q", "user": LONG})[:-1], 400, "invalid_json"),
        (json.dumps({"prompt": "Q", "user": LONG + "\ud800"}), 400, "invalid_json"),
        ('{"user": "' + LONG + '", "prompt": ' + "[" * 300, 400, "invalid_json"),
        (json.dumps([LONG]), 400, "invalid_json"),
        (json.dumps({f"{LONG}{i}": 1 for i in range(257)}), 413, "request_too_large"),
    ],
    ids=["fine", "value", "field", "cut", "surrogate", "deep", "list", "fields"],
)
def test_long_bodies_get_the_same_answer_as_short_ones(
    content: str, status: int, code: str | None
) -> None:
    with running(scripted_runtime(reply_with("x"))) as one:
        headers = {"content-type": "application/json"}
        answer = one.http.post("/v1/completions", content=content, headers=headers)
        if code is None:
            assert answer.status_code == status, answer.text
        else:
            assert error_of(answer, status)["code"] == code
