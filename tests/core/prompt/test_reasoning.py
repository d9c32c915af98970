"""Separation of reasoning and answer, independent of how the reply is cut into chunks."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_core.prompt.reasoning import Piece, ReasoningSplitter, ends_inside, find_tags

PARTS = ["<think>", "</think>", "<", "</", "think>", "<thi", "nk>", " ", "\n", "a", "bé", "> "]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def split(chunks: list[str], begins_inside: bool = False, **tags: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(begins_inside=begins_inside, **tags)
    pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.finish()
    assert all(piece.text for piece in pieces)
    kinds = [piece.is_reasoning for piece in pieces]
    assert kinds == sorted(kinds, reverse=True)  # the reasoning first
    return (
        "".join(piece.text for piece in pieces if piece.is_reasoning),
        "".join(piece.text for piece in pieces if not piece.is_reasoning),
    )


def split_whole(text: str, begins_inside: bool) -> tuple[str, str]:
    opened = re.match(r"\s*<think>\s*", text)
    if opened is not None:
        text = text[opened.end() :]
    elif begins_inside and not "<think>".startswith(text.lstrip()):
        text = text.lstrip()
    elif begins_inside:
        return text, ""
    else:
        return "", text
    closed = re.search(r"\s*</think>\s*", text)
    if closed is None:
        return text, ""
    return text[: closed.start()], text[closed.end() :]


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_chunks_give_the_same_split_as_the_whole_reply(
    text: str, cuts: list[int], begins_inside: bool
) -> None:
    bounds = [0, *sorted(cuts), len(text)]
    chunks = [text[start:end] for start, end in pairwise(bounds)]
    assert split(chunks, begins_inside) == split_whole(text, begins_inside)
    assert split(list(text), begins_inside) == split_whole(text, begins_inside)


@given(TEXTS, st.booleans())
def test_only_a_possible_tag_is_held_back(text: str, begins_inside: bool) -> None:
    splitter = ReasoningSplitter(begins_inside=begins_inside)
    fed = released = ""
    for character in text:
        fed += character
        released += "".join(piece.text for piece in splitter.feed(character))
        reasoning, answer = split_whole(fed, begins_inside)
        assert (reasoning + answer).startswith(released)
        held = (reasoning + answer)[len(released) :].strip()
        assert "<think>".startswith(held) or "</think>".startswith(held)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nSure?\n</think>\n\nYes.", "Sure?", "Yes."),
        ("\n <think>\n\n</think>\n\nYes.", "", "Yes."),
        ("Yes.", "", "Yes."),
        ("  Yes.", "", "  Yes."),
        ("The tag <think> opens, </think> closes.", "", "The tag <think> opens, </think> closes."),
        ("<think>So</think> <think>", "So", "<think>"),
        ("<think>Never done </thin", "Never done </thin", ""),
        ("<think", "", "<think"),
    ],
)
def test_split_by_position_of_the_tags(text: str, reasoning: str, answer: str) -> None:
    assert split([text]) == (reasoning, answer)
    assert split(list(text)) == (reasoning, answer)


@pytest.mark.parametrize(
    "text", ["So?\n</think>\nYes.", "<think>\nSo?</think>Yes.", "\nSo?</think> Yes."]
)
def test_a_reply_may_begin_inside(text: str) -> None:
    assert split(list(text), begins_inside=True) == ("So?", "Yes.")


def test_other_tags() -> None:
    tags: dict[str, Any] = {"opening": "[THINK]", "closing": "[/THINK]"}
    assert split(list("[THINK]a[/THINK]b"), **tags) == ("a", "b")


def test_pieces_are_returned_as_soon_as_they_are_certain() -> None:
    splitter = ReasoningSplitter()
    assert splitter.feed("<think>One") == [Piece(True, "One")]
    assert splitter.feed(" two </th") == [Piece(True, " two")]
    assert splitter.is_inside
    assert splitter.feed("ree </think>Four") == [Piece(True, " </three"), Piece(False, "Four")]
    assert not splitter.is_inside
    assert splitter.feed(" <think") == [Piece(False, " <think")]


def test_a_prompt_that_ends_with_an_opening_tag() -> None:
    assert ends_inside("<|im_start|>assistant\n<think>\n")
    assert not ends_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not ends_inside("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n")
    assert ends_inside("Go on.[THINK]", "[THINK]")


def test_tags_are_found_in_the_template() -> None:
    assert find_tags("") == ("<think>", "</think>")
    assert find_tags("{{ content.split('</think>')[-1] }} [THINK]") == ("<think>", "</think>")
    assert find_tags("{{ '[THINK]' }}") == ("[THINK]", "[/THINK]")
