"""Finds the texts of given tokens in a text: leftmost first, the longest at each position.

A vocabulary can declare thousands of such tokens, and nearly all begin with the same character.
Therefore each candidate position is checked by one lookup per token length, instead of by one large
regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class SpecialText:
    """Splits a text at tokens, given as a table from text to id."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: number for text, number in tokens.items() if text}
        self._lengths = sorted({len(text) for text in self._tokens}, reverse=True)
        firsts = "".join(sorted({text[0] for text in self._tokens}))
        self._candidate = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yields ids of tokens and the non-empty texts between them, in order."""
        start = position = 0
        while self._candidate is not None:
            candidate = self._candidate.search(text, position)
            if candidate is None:
                break
            found = self._match(text, candidate.start())
            if found is None:
                position = candidate.start() + 1
                continue
            if candidate.start() > start:
                yield text[start : candidate.start()]
            yield self._tokens[found]
            start = position = candidate.start() + len(found)
        if start < len(text):
            yield text[start:]

    def _match(self, text: str, position: int) -> str | None:
        for length in self._lengths:
            piece = text[position : position + length]
            if piece in self._tokens:
                return piece
        return None
