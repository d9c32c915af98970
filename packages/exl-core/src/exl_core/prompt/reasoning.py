"""Reasoning and answer of a reply, told apart by tags while it streams.

A reply may begin with reasoning: an opening tag, the reasoning, a closing tag, the answer. Where
the prompt has opened the tag already, the reply begins inside it. Tags further on are text: an
answer may speak of them. White space around a tag belongs to the tag. Knows neither tokens nor
models.
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
    """Some text of a reply, never empty; of its reasoning or of its answer."""

    is_reasoning: bool
    text: str


def ends_inside(prompt: str, opening: str = OPENING) -> bool:
    """Does a rendered prompt end with an opened tag, so that the reply begins with reasoning?"""
    return prompt.rstrip().endswith(opening)


def find_tags(template: str) -> tuple[str, str]:
    """The tags that a chat template, as its source, speaks of; where it says nothing, the usual."""
    named = (tags for tags in _OTHER_TAGS if tags[1] in template or tags[0] in template)
    usual = (OPENING, CLOSING)
    return usual if CLOSING in template else next(named, usual)


class _Stage(Enum):
    START = auto()  # nothing was said yet; an opening tag may come
    OPENED = auto()  # after an opening tag and before anything else
    REASONING = auto()
    CLOSED = auto()  # after the closing tag and before anything else
    ANSWER = auto()


class ReasoningSplitter:
    """Splits a reply piece by piece; `feed` and `finish` together give what the whole would.

    Only what may turn out to be a tag, with the white space before it, is held back. A reply that
    never closes its tag is reasoning to its end.
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
        """Would text that comes now be reasoning?"""
        if self._stage is _Stage.START:
            return self._begins_inside
        return self._stage in (_Stage.OPENED, _Stage.REASONING)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain, now that `text` has come."""
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
        """What was held back, at the end of the reply."""
        return self._release(len(self._held), is_reasoning=self.is_inside)

    def _start(self) -> None:
        said = self._held.lstrip()
        if said.startswith(self._opening):
            self._held = said[len(self._opening) :]
            self._stage = _Stage.OPENED
        elif not self._opening.startswith(said):
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
        """How many of the held characters cannot belong to the closing tag."""
        begun = (
            size
            for size in range(min(len(self._closing) - 1, len(self._held)), 0, -1)
            if self._closing.startswith(self._held[-size:])
        )
        return len(self._held[: len(self._held) - next(begun, 0)].rstrip())

    def _release(self, size: int, *, is_reasoning: bool) -> list[Piece]:
        text, self._held = self._held[:size], self._held[size:]
        return [Piece(is_reasoning, text)] if text else []
