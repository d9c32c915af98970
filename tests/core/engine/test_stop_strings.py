"""Stop strings are found in the text independent of token borders and never emitted in part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_core.engine.stop import StopMatcher


def leftmost(text: str, strings: tuple[str, ...]) -> tuple[str, str | None]:
    """Reference: the occurrence that begins first; of two at one position the shorter."""
    hits = [(text.find(s), len(s), s) for s in strings if s in text]
    if not hits:
        return text, None
    start, _, string = min(hits)
    return text[:start], string


def run(pieces: list[str], strings: tuple[str, ...]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(strings)
    shown = []
    for piece in pieces:
        match = matcher.feed(piece)
        shown.append(match.text)
        if match.stopped_by is not None:
            return shown, match.stopped_by
    match = matcher.finish()
    return [*shown, match.text], match.stopped_by


def all_splits(text: str) -> list[list[str]]:
    if len(text) <= 1:
        return [[text]]
    return [
        split
        for rest in all_splits(text[1:])
        for split in ([text[0] + rest[0], *rest[1:]], [text[0], *rest])
    ]


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("one END two", ("END",)),
        ("EEND", ("END",)),  # a false start just before
        ("ENEND", ("END",)),
        ("the END", ("END",)),  # at the very end
        ("the EN", ("END",)),  # incomplete at the end
        ("END", ("END",)),
        ("aab aac", ("aac",)),
        ("xabcdef", ("cde", "abcdz")),  # a longer one begins earlier and does not match
        ("xabcdef", ("cd", "abcde")),  # a longer one begins earlier and matches
        ("xabc", ("abc", "b")),
        ("xab", ("abc", "b")),
        ("x\n\ny", ("\n", "\n\n")),
        ("naïve 🙂👍 ok", ("🙂👍",)),
        ("é́ok", ("́o",)),
    ],
)
def test_every_split_of_a_text_stops_at_the_same_position(
    text: str, strings: tuple[str, ...]
) -> None:
    expected = leftmost(text, strings)
    for pieces in all_splits(text):
        shown, stopped_by = run(pieces, strings)
        assert ("".join(shown), stopped_by) == expected, pieces
        assert run(pieces, strings[::-1]) == (shown, stopped_by), "the order of the list"


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_random_overlapping_strings(pieces: list[str], strings: tuple[str, ...]) -> None:
    shown, stopped_by = run(pieces, strings)
    assert ("".join(shown), stopped_by) == leftmost("".join(pieces), strings)


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=10),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
)
def test_no_stop_string_can_begin_in_emitted_text(
    pieces: list[str], strings: tuple[str, ...]
) -> None:
    matcher = StopMatcher(strings)
    text = shown = ""
    for piece in pieces:
        match = matcher.feed(piece)
        text += piece
        shown += match.text
        for start in range(len(shown)):
            rest = text[start:]
            assert not any(s.startswith(rest) or rest.startswith(s) for s in strings)
        if match.stopped_by is not None:
            assert text[len(shown) :].startswith(match.stopped_by)
            return


def test_text_is_held_no_longer_than_needed() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("to the E").text == "to the "
    assert matcher.feed("N").text == ""
    assert matcher.feed("T").text == "ENT"
    assert matcher.feed("ER").text == "ER"[:2]


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher(())
    assert [matcher.feed(c).text for c in "END"] == ["E", "N", "D"]
