"""Highlighting of Markdown: every character is printed once, and the colors do not depend on how
the stream is split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style

from exl_cli.chat.markdown import CODE, HEADING, MARK, PLAIN, MarkdownStream

PARTS = ["*", "**", "`", "```", "```python\n", "~~~\n", "\n", " ", "# ", "##", "\\", "a", "b c"]
PARTS += ["def f():\n", "'''x\n", "    return 1\n", "- ", "é"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=25).map("".join)


def shown(chunks: list[str]) -> list[tuple[str, Style]]:
    """Each printed character with its style."""
    characters: list[tuple[str, Style]] = []
    stream = MarkdownStream(lambda text, style: characters.extend((one, style) for one in text))
    for chunk in chunks:
        stream.feed(chunk)
    stream.close()
    return characters


def styles(text: str) -> dict[Style, str]:
    """The printed characters, by style."""
    found: dict[Style, str] = {}
    for character, style in shown([text]):
        found[style] = found.get(style, "") + character
    return found


@given(TEXTS, st.lists(st.integers(0, 80), max_size=10))
def test_output_does_not_depend_on_how_the_stream_is_split(text: str, cuts: list[int]) -> None:
    whole = shown([text])
    assert "".join(character for character, _ in whole) == text
    bounds = [0, *sorted(cuts), len(text)]
    assert shown([text[start:end] for start, end in pairwise(bounds)]) == whole
    assert shown(list(text)) == whole


@given(TEXTS)
def test_only_the_current_line_is_held_back(text: str) -> None:
    seen: list[str] = []
    stream = MarkdownStream(lambda piece, _style: seen.append(piece))
    for count, character in enumerate(text, start=1):
        stream.feed(character)
        missing = text[len("".join(seen)) : count]
        assert "\n" not in missing


def test_bold_italic_code_and_headings() -> None:
    assert styles("# Top\nSo **bold**, *thin*, `x*y*`.") == {
        HEADING: "# Top",
        PLAIN: "\nSo , , .",
        MARK: "****" + "**" + "``",
        PLAIN + Style(bold=True): "bold",
        PLAIN + Style(italic=True): "thin",
        CODE: "x*y*",
    }


@pytest.mark.parametrize("text", ["2 * 3 ** 4", "a*b", "#no heading", "* item", r"\*x\*", "* *"])
def test_characters_that_only_resemble_markup_are_text(text: str) -> None:
    assert list(styles(text)) == [PLAIN]


def test_code_is_highlighted_for_its_language() -> None:
    found = styles("```python\ndef f(): return 'x'\n```\nafter")
    assert found[MARK] == "```python\n```\n"
    assert found[PLAIN].endswith("after")
    keyword = next(style for style, text in found.items() if "def" in text)
    assert keyword != PLAIN
    assert "return" in found[keyword]
    assert set(styles("```\nx\n```")) == set(styles("```no-such-language\nx\n```")) == {MARK, CODE}


def test_multiline_string_keeps_its_color() -> None:
    found = styles("```python\nx = '''a\nimport b\n'''\n```")
    inside = next(style for style, text in found.items() if "import b" in text)
    assert inside not in styles("```python\nimport b\n```")


def test_code_block_ends_only_with_its_own_fence() -> None:
    found = styles("````\n```\ninner\n```\n````\nout")
    assert found[CODE] == "```\ninner\n```\n"
    assert found[PLAIN].endswith("out")
