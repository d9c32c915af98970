"""Stop strings in text that arrives in pieces: what may be printed, and where to stop.

Occurrences are looked for in the text, wherever the pieces meet: characters (code points), case
sensitive. The one that begins first wins, whichever string of the list it is; of two that begin
together, the shorter. So the result depends on the text alone, neither on the order of the list
nor on the token borders. To know that nothing begins earlier, text that could still become a stop
string is held back, also when a string that begins later is already complete behind it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` is what may be printed now; `stopped_by` is set once a stop string was found.

    `rest` is then the stop string and what came after it.
    """

    text: str
    stopped_by: str | None
    rest: str = ""


class StopMatcher:
    """Of one reply. After a match it must not be fed again."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = tuple(sorted(set(strings), key=lambda string: (len(string), string)))
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        if not self._strings:
            return StopMatch(text, None)
        self._held += text
        return self._scan(is_end=False)

    def finish(self, text: str = "") -> StopMatch:
        """The text ends with this: what was held as a beginning will not become a stop string."""
        self._held += text
        return self._scan(is_end=True)

    @property
    def held(self) -> str:
        """What could still become a stop string."""
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
