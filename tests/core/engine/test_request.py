"""Requests are checked at construction."""

from __future__ import annotations

import pytest

from exl_core.engine.request import Request
from exl_core.errors import RequestError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt_ids": ()}, "the prompt is empty"),
        ({"prompt_ids": (1, -1)}, "prompt_ids holds something that is no token id"),
        ({"prompt_ids": (1, 2.5)}, "prompt_ids holds something that is no token id"),
        ({"prompt_ids": (True,)}, "prompt_ids holds something that is no token id"),
        ({"stop_ids": {-2}}, "stop_ids holds something that is no token id"),
        ({"stop_strings": ("a", "")}, "stop_strings holds something that no text can match"),
        ({"stop_strings": (3,)}, "stop_strings holds something that no text can match"),
        ({"max_tokens": -1}, "max_tokens is out of range"),
        ({"max_tokens": 1.5}, "max_tokens is out of range"),
        ({"min_tokens": -1}, "min_tokens is out of range"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is more than max_tokens"),
    ],
)
def test_invalid_arguments_are_refused_by_name(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Request(**{"prompt_ids": (1,), **arguments})  # type: ignore[arg-type]


def test_lists_are_frozen_and_a_single_stop_string_needs_no_tuple() -> None:
    request = Request([1, 2], stop_ids=[3], stop_strings="END")  # type: ignore[arg-type]
    assert request.prompt_ids == (1, 2)
    assert request.stop_ids == frozenset({3})
    assert request.stop_strings == ("END",)


def test_default_request_ids_are_unique() -> None:
    assert Request((1,)).request_id != Request((1,)).request_id
