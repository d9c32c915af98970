"""Streaming Markdown for a terminal: every character is shown once, in order, with a style.

Nothing is erased or redrawn, so there is no flicker and resizing the window is harmless. Without
the styles, the output equals the input. Ambiguous input is held back until the next characters
decide: the start of a line that may be a heading or a fence, a run of `*` or of backticks, and the
current line of a code block, because its highlighting depends on the end of the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rich.style import Style
from rich.syntax import Syntax

Emit = Callable[[str, Style], None]

PLAIN = Style()
MARK = Style(dim=True)
HEADING = Style(bold=True, underline=True)
CODE = Style(color="cyan")

_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]*)")
_FENCE_BEGINNING = re.compile(r" {0,3}(`{0,2}|~{0,2}|(`{3,}|~{3,}).*)")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]")
_HEADING_BEGINNING = re.compile(r" {0,3}#{0,6}")
_THEME = Syntax.get_theme("ansi_dark")


class MarkdownStream:
    """Markdown parser: `feed` it text as it arrives, then `close`. It calls `emit(text, style)`."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""
        self._at_line_start = True
        self._line_style = PLAIN
        self._before = "\n"  # last character shown
        self._bold = self._italic = False
        self._code_ticks = 0
        self._fence = ""
        self._lexer: Any = None  # a pygments lexer; pygments has no type annotations
        self._code = ""

    def feed(self, text: str) -> None:
        self._held += text
        while self._held and self._advance(is_end=False):
            pass

    def close(self) -> None:
        """End the text: emit the input held back, which no further character can change."""
        while self._held and self._advance(is_end=True):
            pass

    @property
    def is_in_block(self) -> bool:
        """True while lines of a fenced code block are emitted."""
        return bool(self._fence)

    def _advance(self, *, is_end: bool) -> bool:
        """Show some of the held text; False if more input is needed first."""
        if self._fence:
            return self._advance_in_block(is_end=is_end)
        if self._at_line_start:
            return self._begin_line(is_end=is_end)
        return self._advance_in_line(is_end=is_end)

    def _begin_line(self, *, is_end: bool) -> bool:
        line, newline, _ = self._held.partition("\n")
        is_whole = is_end or bool(newline)
        if not is_whole and _FENCE_BEGINNING.fullmatch(line):
            return False
        if is_whole and (fence := _FENCE.match(line)):
            self._fence, self._code = fence[1], ""
            self._lexer = Syntax("", fence[2]).lexer if fence[2] else None
            self._show(line + newline, MARK)
            return True
        if not is_whole and _HEADING_BEGINNING.fullmatch(line):
            return False
        self._line_style = HEADING if _HEADING.match(line) else PLAIN
        self._at_line_start = False
        return True

    def _advance_in_line(self, *, is_end: bool) -> bool:
        first = self._held[0]
        if first == "\n":
            self._bold = self._italic = False
            self._code_ticks = 0
            self._at_line_start = True
            self._line_style = PLAIN
            self._show("\n", PLAIN)
            return True
        if first not in "*`\\":
            match = re.match(r"[^*`\\\n]+", self._held)
            assert match is not None
            self._show(match[0], self._style())
            return True
        if first == "\\" and not self._code_ticks:
            if len(self._held) < 2 and not is_end:
                return False
            size = 1 if self._held[1:2] in ("", "\n") else 2
            self._show(self._held[:size], self._style())
            return True
        run = len(self._held) - len(self._held.lstrip(first))
        if run == len(self._held) and not is_end:
            return False
        self._mark(first, run)
        return True

    def _mark(self, char: str, run: int) -> None:
        """Handle a run of `*` or backticks that opens or closes a span, or is plain text."""
        text, after = self._held[:run], self._held[run : run + 1] or "\n"
        if char == "`" and self._code_ticks in (0, run):
            self._code_ticks = 0 if self._code_ticks else run
            self._show(text, MARK)
            return
        if char != "*" or self._code_ticks or run > 3:
            self._show(text, self._style())
            return
        opens = not after.isspace() and not (run == 1 and self._before.isalnum())
        closes = not self._before.isspace()
        is_mark = False
        if run in (2, 3) and (closes if self._bold else opens):
            self._bold, is_mark = not self._bold, True
        if run in (1, 3) and (closes if self._italic else opens):
            self._italic, is_mark = not self._italic, True
        self._show(text, MARK if is_mark else self._style())

    def _style(self) -> Style:
        if self._code_ticks:
            return CODE
        return self._line_style + Style(bold=self._bold or None, italic=self._italic or None)

    def _advance_in_block(self, *, is_end: bool) -> bool:
        line, newline, _ = self._held.partition("\n")
        if not newline and not is_end:
            return False
        end = line.strip()
        if set(end) == {self._fence[0]} and len(end) >= len(self._fence):
            self._fence = ""
            self._show(line + newline, MARK)
        else:
            self._show_code(line + newline)
        return True

    def _show_code(self, line: str) -> None:
        """Highlight one line of a code block.

        The lexer runs over all lines of the block so far, because a string may have begun on an
        earlier one.
        """
        begin = len(self._code)
        self._code += line
        if self._lexer is None:
            self._show(line, CODE)
            return
        for start, kind, text in self._lexer.get_tokens_unprocessed(self._code):
            part = text[max(0, begin - start) :]
            if part:
                self._show(part, _THEME.get_style_for_token(kind))

    def _show(self, text: str, style: Style) -> None:
        self._emit(text, style)
        self._before = text[-1]
        self._held = self._held[len(text) :]
