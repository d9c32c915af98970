"""Line breaks of streamed text: no word is cut, no text is lost, and the width may change."""

from __future__ import annotations

import re
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from exl_cli.chat.markdown import MarkdownStream
from exl_cli.chat.screen import ReplyScreen
from exl_cli.wrap import WordWrap

PLAIN = Style.null()
PIECES = st.lists(
    st.sampled_from(["a", "bb", "longer", "x" * 30, " ", "  ", "\n", "你", "好", "。", "-", "👍"]),
    max_size=40,
)


def wrapped(text: str, width: int, piece: int = 3) -> str:
    shown: list[str] = []
    wrapping = WordWrap(lambda part, _: shown.append(part), lambda: width)
    for at in range(0, len(text), piece):
        wrapping.feed(text[at : at + piece], PLAIN)
    wrapping.close()
    return "".join(shown)


@given(PIECES, st.sampled_from([8, 10, 21]), st.integers(1, 7))
def test_text_is_kept_and_the_pieces_do_not_matter(
    pieces: list[str], width: int, piece: int
) -> None:
    text = "".join(pieces)
    shown = wrapped(text, width, piece)
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    assert shown == wrapped(text, width, len(text) + 1)


@given(st.lists(st.sampled_from(["a", "bb", "ccccc", "dddddddd"]), min_size=1, max_size=40))
def test_lines_fit_and_have_as_many_words_as_fit(words: list[str]) -> None:
    lines = wrapped(" ".join(words), 10).split("\n")
    assert " ".join(lines).split() == words
    assert all(cell_len(line) <= 10 for line in lines)
    for line, after in pairwise(lines):
        assert len(line) + 1 + len(after.split()[0]) > 10


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree"),
        ("12345678 9", "12345678\n9"),
        ("12345678  \n9", "12345678\n9"),
        ("    indented text", "    indented\ntext"),
        ("a\n\nb", "a\n\nb"),
        ("你好你好你好。", "你好你好\n你好。"),
        ("see https://a.example/long/path now", "see\nhttps://a.example/long/path now"),
    ],
)
def test_breaks_of_a_window_of_eight_columns(text: str, shown: str) -> None:
    assert wrapped(text, 8) == shown


def test_a_resized_window_changes_the_next_line() -> None:
    shown: list[str] = []
    widths = [20]
    wrapping = WordWrap(lambda part, _: shown.append(part), lambda: widths[0])
    wrapping.feed("one two three four ", PLAIN)
    widths[0] = 9
    wrapping.feed("five six seven ", PLAIN)
    wrapping.close()
    assert "".join(shown) == "one two three four\nfive six\nseven "


def test_a_long_word_streams_before_its_end() -> None:
    shown: list[str] = []
    wrapping = WordWrap(lambda part, _: shown.append(part), lambda: 8)
    wrapping.feed("a " + "x" * 9, PLAIN)
    assert "".join(shown) == "a\n" + "x" * 9
    wrapping.feed("y", PLAIN)
    assert "".join(shown).endswith("xy")


@pytest.mark.parametrize("colors", ["truecolor", None])
def test_code_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, colors: str | None) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR" if colors is None else "FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown: list[str] = []
    monkeypatch.setattr("exl_cli.output.write_text", shown.append)
    monkeypatch.setattr(WordWrap.__init__, "__defaults__", (lambda: 12,))
    screen = ReplyScreen(shows_reasoning=False)
    screen.say("some words here\n```\ncode that is longer\n```\nmore words here")
    screen.close()
    seen = re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))
    assert seen == "some words\nhere\n```\ncode that is longer\n```\nmore words\nhere\n"


def test_a_stream_says_whether_it_is_inside_code() -> None:
    seen: list[bool] = []
    stream = MarkdownStream(lambda _text, _style: seen.append(stream.is_in_block))
    stream.feed("text\n```\ncode\n```\n")
    assert seen == [False, False, True, True, False]
