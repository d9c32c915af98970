"""Finds the texts of given tokens in a text: leftmost first, the longest at each position.

A vocabulary can declare thousands of such tokens, and nearly all begin with the same character.
Therefore each candidate position is checked by one lookup per token length, instead of by one large
regular expression.

A prompt mixes text of a chat template with text of messages. `Trust` marks the characters that the
template wrote: only they may form special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trust:
    """Characters of a prompt that may form special tokens.

    characters  one byte per character: 1 where the chat template wrote it
    template    source of the template. Added tokens that it names are special too, even where the
                vocabulary does not call them so
    """

    characters: bytes
    template: str


class SpecialText:
    """Splits a text at tokens, given as a table from text to id."""

    def __init__(self, tokens: Mapping[str, int], marks: Collection[str] = ()) -> None:
        """`marks`: tokens that are found in trusted characters only, if trust is given."""
        self._tokens = {text: number for text, number in tokens.items() if text}
        self._marks = frozenset(marks)
        self._lengths = sorted({len(text) for text in self._tokens}, reverse=True)
        firsts = "".join(sorted({text[0] for text in self._tokens}))
        self._candidate = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def split(self, text: str, trusted: bytes | None = None) -> Iterator[str | int]:
        """Yields ids of tokens and the non-empty texts between them, in order."""
        start = 0
        for position, found in self.places(text, trusted):
            if position > start:
                yield text[start:position]
            yield self._tokens[found]
            start = position + len(found)
        if start < len(text):
            yield text[start:]

    def places(self, text: str, trusted: bytes | None = None) -> Iterator[tuple[int, str]]:
        """Yields position and text of each token."""
        position = 0
        while self._candidate is not None:
            candidate = self._candidate.search(text, position)
            if candidate is None:
                return
            found = self._match(text, candidate.start(), trusted)
            position = candidate.start() + (1 if found is None else len(found))
            if found is not None:
                yield candidate.start(), found

    def _match(self, text: str, position: int, trusted: bytes | None) -> str | None:
        for length in self._lengths:
            piece = text[position : position + length]
            if piece not in self._tokens:
                continue
            if trusted is None or piece not in self._marks:
                return piece
            if 0 not in trusted[position : position + length]:
                return piece
        return None


def named_marks(added: Mapping[str, int], template: str) -> dict[str, int]:
    """Added tokens that a template names. Words and white space are text, not marks."""
    return {
        text: number
        for text, number in added.items()
        if text in template and not all(char.isalnum() or char.isspace() for char in text)
    }
