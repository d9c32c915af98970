"""Line breaks between words, for text that streams to a terminal.

A word is held until its end is known, and goes to the next line if the current one has no room for
it. Nothing is erased or redrawn. The width is asked for at every word, so a resized window changes
the next line without a signal handler. A word that is wider than the window is left to the
terminal. Knows styles as values that it passes on.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style

from exl_cli import output

if TYPE_CHECKING:
    from exl_core.engine.events import TextEvent

Emit = Callable[[str, Style], None]

_PIECE = re.compile(r"\n|[^\S\n]+|\S+")
_DEFAULT_WIDTH = 80
_TAB = 8
# Characters that may not begin a line, in scripts that break between any two characters.
_NO_START = frozenset(
    "、。，．：；！？）」』】〉》〕…ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ"  # noqa: RUF001 - signs of these scripts
    ",.:;!?)]}\"'"
)


def stdout_width() -> int:
    """Columns of the terminal that stdout is now; 80 if it does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _DEFAULT_WIDTH
    except (OSError, ValueError):
        return _DEFAULT_WIDTH


class WordWrap:
    """`feed` it text as it arrives, then `close`. It calls `emit(text, style)`.

    Spaces at a break are dropped. All other text is emitted once and in order.
    """

    def __init__(self, emit: Emit, width: Callable[[], int] = stdout_width) -> None:
        self._emit = emit
        self._width = width
        self._column = 0
        self._spaces: list[tuple[str, Style]] = []
        self._word: list[tuple[str, Style]] = []
        self._is_inside = False  # a part of the current word is shown already
        self._before = ""  # last character of the current word

    def feed(self, text: str, style: Style, *, breaks: bool = True) -> None:
        """`breaks` false: show the text as it is, for lines of code."""
        if not breaks:
            self._end_word()
            self._show_spaces()
            self._show(text, style)
            return
        for piece in _PIECE.findall(text):
            if piece == "\n":
                self._end_line(style)
            elif piece.isspace():
                self._end_word()
                self._spaces.append((piece, style))
            else:
                self._take_word(piece, style)

    def close(self) -> None:
        """End the text: show what is held."""
        self._end_word()
        self._show_last_spaces()

    def _take_word(self, text: str, style: Style) -> None:
        start = 0
        for at, char in enumerate(text):
            before = text[at - 1] if at else self._before
            is_break = char not in _NO_START and (_is_wide(char) or _is_wide(before))
            if is_break and before:
                self._hold(text[start:at], style)
                self._place()
                self._is_inside = False
                start = at
        self._hold(text[start:], style)
        self._before = text[-1]
        if self._is_inside or _cells(self._word) >= self._width():
            self._place()
            self._is_inside = True

    def _end_word(self) -> None:
        self._place()
        self._is_inside, self._before = False, ""

    def _hold(self, text: str, style: Style) -> None:
        if text:
            self._word.append((text, style))

    def _place(self) -> None:
        """Show the held word: on this line if it fits, otherwise on the next one."""
        if not self._word:
            return
        size = _cells(self._spaces) + _cells(self._word)
        if self._column and not self._is_inside and self._column + size > self._width():
            self._spaces.clear()
            self._show("\n", Style.null())
        self._show_spaces()
        for text, style in self._word:
            self._show(text, style)
        self._word.clear()

    def _end_line(self, style: Style) -> None:
        self._end_word()
        self._show_last_spaces()
        self._show("\n", style)

    def _show_last_spaces(self) -> None:
        if self._column + _cells(self._spaces) > self._width():
            self._spaces.clear()
        self._show_spaces()

    def _show_spaces(self) -> None:
        for text, style in self._spaces:
            self._show(text, style)
        self._spaces.clear()

    def _show(self, text: str, style: Style) -> None:
        """Emit, and count the column. A full line without a newline ends where the window does."""
        self._emit(text, style)
        _, newline, rest = text.rpartition("\n")
        column = (0 if newline else self._column) + cell_len(rest.replace("\t", " " * _TAB))
        width = self._width()
        if column > width:
            column = (column - 1) % width + 1
        self._column = column


class TextWriter:
    """Writes a reply to stdout as it arrives, wrapped on a terminal. A context manager: leaving it
    completes the text."""

    def __init__(self) -> None:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        is_wrapped = is_terminal and not Console().is_dumb_terminal
        self._wrap = WordWrap(lambda text, _: output.write_text(text)) if is_wrapped else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._wrap is not None:
            self._wrap.close()

    def write(self, event: TextEvent) -> None:
        if self._wrap is None:
            output.write_text(event.text)
        else:
            self._wrap.feed(event.text, Style.null())


def _cells(held: list[tuple[str, Style]]) -> int:
    return sum(cell_len(text.replace("\t", " " * _TAB)) for text, _ in held)


def _is_wide(char: str) -> bool:
    return bool(char) and cell_len(char) == 2
