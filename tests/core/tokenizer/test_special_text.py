"""Splitting a text at special tokens: leftmost first, then longest, without loss."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_core.tokenizer.special_text import SpecialText

TOKENS = {"<a>": 1, "<a>b": 2, "<": 3, "xx": 4, "]^-\\": 5}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("plain", ["plain"]),
        ("<a>", [1]),
        ("<a>b", [2]),
        ("<a>c", [1, "c"]),
        ("<<a>b<", [3, 2, 3]),
        ("xxx", [4, "x"]),
        ("axx<b", ["a", 4, 3, "b"]),
        ("]^-\\]", [5, "]"]),
    ],
)
def test_the_leftmost_longest_token_matches(text: str, parts: list[str | int]) -> None:
    assert list(SpecialText(TOKENS).split(text)) == parts


def test_without_tokens_a_text_stays_whole() -> None:
    assert list(SpecialText({}).split("<a>")) == ["<a>"]
    assert list(SpecialText({"": 1}).split("<a>")) == ["<a>"]


@given(st.text(alphabet="<a>bx]^-\\ "))
def test_splits_match_a_regular_expression_of_all_tokens(text: str) -> None:
    pattern = "|".join(re.escape(token) for token in sorted(TOKENS, key=len, reverse=True))
    expected = [TOKENS.get(part, part) for part in re.split(f"({pattern})", text) if part]

    assert list(SpecialText(TOKENS).split(text)) == expected
