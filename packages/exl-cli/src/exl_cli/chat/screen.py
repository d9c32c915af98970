"""Output of one streamed reply: styled Markdown on a color terminal, plain text elsewhere.

stdout gets the reply and nothing else. Reasoning goes to stderr. On a terminal it is one line with
a token counter; with `shows_reasoning` it is printed in full. Control characters other than
newlines and tabs are removed from text that goes to a terminal. Text wraps between words there, but
code does not.
"""

from __future__ import annotations

import re
import sys
import time

from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

from exl_cli import output
from exl_cli.chat.markdown import PLAIN, MarkdownStream
from exl_cli.render import stderr_console
from exl_cli.wrap import WordWrap

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REDRAW_S = 0.1


class ReplyScreen:
    """Shows one reply: call `read`, `think` and `say` as text arrives, then `close`."""

    def __init__(
        self, *, shows_reasoning: bool, is_quiet: bool = False, wraps: bool = True
    ) -> None:
        stdout = Console(highlight=False)
        self._is_watched = sys.stdout is not None and sys.stdout.isatty()
        system = None if stdout.no_color else stdout.color_system
        self._colors = None if system is None else COLOR_SYSTEMS[system]
        is_wrapped = wraps and self._is_watched and not stdout.is_dumb_terminal
        self._wrap = WordWrap(self._emit) if is_wrapped else None
        has_markdown = self._colors is not None or is_wrapped
        self._markdown = MarkdownStream(self._style) if has_markdown else None
        self._notes = stderr_console()
        self._can_redraw = self._notes.is_terminal and not self._notes.is_dumb_terminal
        self._shows_progress = self._can_redraw and not is_quiet
        self._shows_reasoning = shows_reasoning
        self._thought_tokens = 0
        self._drawn_at = -_REDRAW_S
        self._is_reading = False
        self._is_thinking = False
        self._has_said = False

    def read(self, done: int, total: int) -> None:
        """Show that `done` of `total` prompt tokens are computed.

        Does nothing once the reply has started: the line would be drawn over the reply.
        """
        if self._shows_progress and not (self._is_thinking or self._has_said):
            self._is_reading = True
            self._draw_count(f"reading... {done} of {total} tokens")

    def think(self, text: str, tokens: int) -> None:
        """Show or count a piece of reasoning of `tokens` tokens."""
        self._stop_reading()
        self._thought_tokens += tokens
        self._is_thinking = True
        if self._shows_reasoning:
            self._notes.print(
                _CONTROL.sub("", text), style="dim", markup=False, end="", soft_wrap=True
            )
        elif self._can_redraw:
            now = time.monotonic()
            if now - self._drawn_at >= _REDRAW_S:
                self._drawn_at = now
                self._draw_count(f"thinking... {self._thought_tokens} tokens")

    def say(self, text: str) -> None:
        """Show a piece of the answer."""
        self._stop_reading()
        self._stop_thinking()
        if not self._has_said:
            text = text.lstrip()
        if not text:
            return
        self._has_said = True
        if self._is_watched:
            text = _CONTROL.sub("", text)
        if self._markdown is None:
            self._style(text, PLAIN)
        else:
            self._markdown.feed(text)

    def close(self) -> None:
        self._stop_reading()
        self._stop_thinking()
        if self._markdown is not None:
            self._markdown.close()
        if self._wrap is not None:
            self._wrap.close()
        output.write_text("\n")

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._draw_count("")

    def _stop_thinking(self) -> None:
        if not self._is_thinking:
            return
        self._is_thinking = False
        if self._shows_reasoning:
            self._notes.print("\n")
        elif self._notes.is_terminal:
            self._draw_count(f"thought for {self._thought_tokens} tokens (/set reasoning show)")
            self._notes.print()

    def _draw_count(self, text: str) -> None:
        """Redraw the status line, truncated to the width of the terminal."""
        shown = text[: max(1, self._notes.width - 1)]
        self._notes.file.write("\r\x1b[K" if self._can_redraw else "")
        self._notes.print(shown, style="dim", markup=False, end="")
        self._notes.file.flush()

    def _style(self, text: str, style: Style) -> None:
        if self._wrap is None:
            self._emit(text, style)
        else:
            is_code = self._markdown is not None and self._markdown.is_in_block
            self._wrap.feed(text, style, breaks=not is_code)

    def _emit(self, text: str, style: Style) -> None:
        output.write_text(style.render(text, color_system=self._colors))
