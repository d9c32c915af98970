"""Stop strings in streamed text: which text may be emitted, and where the reply stops.

Strings are matched in the joined text, independent of token borders, by code points and with case.
The occurrence that begins first counts; of two that begin at the same character, the shorter. The
result thus depends on the text alone, neither on the order of the list nor on token borders. Text
that may still become a stop string is held back, even if a string that begins later is already
complete: otherwise an earlier occurrence could be missed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Result of one call: text to emit, and the stop string if one was found.

    `rest` is the stop string and the text after it; empty without a match.
    """

    text: str
    stopped_by: str | None
    rest: str = ""


class StopMatcher:
    """Matcher of one reply. It must not be fed again after a match."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = tuple(sorted(set(strings), key=lambda string: (len(string), string)))
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        if not self._strings and not self._held:
            return StopMatch(text, None)
        self._held += text
        return self._scan(is_end=False)

    def changed(self, strings: tuple[str, ...]) -> StopMatcher:
        """A matcher for other strings that continues with the held text of this one."""
        other = StopMatcher(strings)
        other._held = self._held
        return other

    def finish(self, text: str = "") -> StopMatch:
        """Add the last text. Held text that is not part of a stop string is returned."""
        self._held += text
        return self._scan(is_end=True)

    @property
    def held(self) -> str:
        """Text that may still become a stop string."""
        return self._held

    def _scan(self, *, is_end: bool) -> StopMatch:
        held = self._held
        for start in range(len(held)):
            found = next((s for s in self._strings if held.startswith(s, start)), None)
            if found is not None:
                self._held = ""
                return StopMatch(held[:start], found, held[start:])
            if not is_end and self._is_beginning(held[start:]):
                self._held = held[start:]
                return StopMatch(held[:start], None)
        self._held = ""
        return StopMatch(held, None)

    def _is_beginning(self, tail: str) -> bool:
        return any(string.startswith(tail) for string in self._strings)
