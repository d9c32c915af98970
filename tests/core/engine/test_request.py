"""Requests are checked at construction."""

from __future__ import annotations

import pytest

from exl_core.constrain.regex import Regex
from exl_core.engine.request import Report, Request
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
        ({"max_time_s": "2"}, "max_time_s has the wrong type .*expected a number, got '2'"),
        ({"max_time_s": True}, "max_time_s has the wrong type"),
        ({"max_time_s": float("nan")}, "max_time_s is out of range"),
        ({"sampler": 5}, "sampler has the wrong type .*expected a SamplerParams, got 5"),
        ({"report": 5}, "report has the wrong type"),
        ({"request_id": 5}, "request_id has the wrong type"),
        ({"prefer_eos": "no", "stop_ids": (1,)}, "prefer_eos has the wrong type"),
        ({"prompt_ids": 5}, "prompt_ids has the wrong type"),
        ({"stop_strings": 5}, "stop_strings has the wrong type"),
        ({"constraints": Regex("a")}, "constraints has the wrong type .*expected a tuple"),
        ({"constraints": "a"}, "constraints has the wrong type"),
        ({"adapters": (1,)}, "adapters has the wrong type .*AdapterUse"),
        ({"embeddings": (1,)}, "embeddings has the wrong type"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is more than max_tokens"),
    ],
)
def test_invalid_arguments_are_refused_by_name(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Request(**{"prompt_ids": (1,), **arguments})  # type: ignore[arg-type]


def test_details_of_a_report_are_true_or_false() -> None:
    with pytest.raises(RequestError, match="logits has the wrong type"):
        Report(logits="no")  # type: ignore[arg-type]


def test_lists_are_frozen_and_a_single_stop_string_needs_no_tuple() -> None:
    request = Request([1, 2], stop_ids=[3], stop_strings="END")  # type: ignore[arg-type]
    assert request.prompt_ids == (1, 2)
    assert request.stop_ids == frozenset({3})
    assert request.stop_strings == ("END",)


def test_default_request_ids_are_unique() -> None:
    assert Request((1,)).request_id != Request((1,)).request_id
