"""Separation of a streamed reply into reasoning and answer, by tags.

A reply may begin with reasoning: an opening tag, the reasoning, a closing tag, then the answer. If
the prompt ends with the opening tag, the reply begins inside the reasoning. Later tags are text,
because an answer may mention them. White space around a tag belongs to the tag. This module uses
neither tokens nor models.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

OPENING = "<think>"
CLOSING = "</think>"
_OTHER_TAGS = (
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<reasoning>", "</reasoning>"),  # Reka Flash
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Nonempty part of a reply's reasoning or of its answer."""

    is_reasoning: bool
    text: str


def ends_inside(prompt: str, opening: str = OPENING) -> bool:
    """Whether a rendered prompt ends with the opening tag, so that the reply begins inside."""
    return prompt.rstrip().endswith(opening)


def find_tags(template: str) -> tuple[str, str]:
    """Tags that occur in the source of a chat template; by default `<think>` and `</think>`."""
    named = (tags for tags in _OTHER_TAGS if tags[1] in template or tags[0] in template)
    usual = (OPENING, CLOSING)
    return usual if CLOSING in template else next(named, usual)


class _Stage(Enum):
    START = auto()  # no text yet; an opening tag may follow
    OPENED = auto()  # after the opening tag, before any text
    REASONING = auto()
    CLOSED = auto()  # after the closing tag, before any text
    ANSWER = auto()


class ReasoningSplitter:
    """Splits a reply as it streams. The pieces do not depend on where the stream is cut.

    Only text that may become a tag is held back, with the white space before it. A reply without a
    closing tag is reasoning to its end.
    """

    def __init__(
        self, opening: str = OPENING, closing: str = CLOSING, begins_inside: bool = False
    ) -> None:
        self._opening = opening
        self._closing = closing
        self._begins_inside = begins_inside
        self._stage = _Stage.START
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """Whether the next text is reasoning."""
        if self._stage is _Stage.START:
            return self._begins_inside
        return self._stage in (_Stage.OPENED, _Stage.REASONING)

    def feed(self, text: str) -> list[Piece]:
        """Add text of the reply; return the pieces that are certain now."""
        self._held += text
        if self._stage is _Stage.START:
            self._start()
        pieces: list[Piece] = []
        if self._stage is _Stage.OPENED:
            self._skip_space(_Stage.REASONING)
        if self._stage is _Stage.REASONING:
            pieces += self._reason()
        if self._stage is _Stage.CLOSED:
            self._skip_space(_Stage.ANSWER)
        if self._stage is _Stage.ANSWER:
            pieces += self._release(len(self._held), is_reasoning=False)
        return pieces

    def finish(self) -> list[Piece]:
        """End the reply; return the text that was held back."""
        return self._release(len(self._held), is_reasoning=self.is_inside)

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._held = text[len(self._opening) :]
            self._stage = _Stage.OPENED
        elif not self._opening.startswith(text):
            self._stage = _Stage.OPENED if self._begins_inside else _Stage.ANSWER

    def _skip_space(self, following: _Stage) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._stage = following

    def _reason(self) -> list[Piece]:
        reasoning, closing, answer = self._held.partition(self._closing)
        if not closing:
            return self._release(self._certain(), is_reasoning=True)
        self._held = reasoning.rstrip()
        pieces = self._release(len(self._held), is_reasoning=True)
        self._held = answer
        self._stage = _Stage.CLOSED
        return pieces

    def _certain(self) -> int:
        """Number of held characters that cannot belong to the closing tag."""
        begun = (
            size
            for size in range(min(len(self._closing) - 1, len(self._held)), 0, -1)
            if self._closing.startswith(self._held[-size:])
        )
        return len(self._held[: len(self._held) - next(begun, 0)].rstrip())

    def _release(self, size: int, *, is_reasoning: bool) -> list[Piece]:
        text, self._held = self._held[:size], self._held[size:]
        return [Piece(is_reasoning, text)] if text else []
