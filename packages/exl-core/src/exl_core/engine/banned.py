"""Banned strings in text that arrives in pieces: what is safe to show, and where to go back to.

Upper and lower case are the same. Text is held back token by token, from the token in which a
banned string may have begun: if it does come up, that whole token is taken back, and none of its
text has been shown. A string that is there already wins over one that may yet come, and of several
the one that began first.

What later tokens made harmless is still held while these may be taken back themselves: shown text
never ends with the beginning of a banned string.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State")


class Rewind(NamedTuple, Generic[State]):
    """Go back to before token `place`, where whatever reads the tokens was in `state`."""

    place: int
    state: State
    text: str
    """Of the tokens that are taken back."""


@dataclass(slots=True)
class _Held(Generic[State]):
    place: int
    text: str
    state: State


class BannedStrings(Generic[State]):
    """Of one reply. `State` is whatever the caller needs to go back to; it is not looked at."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = tuple(fold(string) for string in strings)
        self._longest = max(map(len, self._strings), default=0)
        self._held: list[_Held[State]] = []

    @property
    def num_held(self) -> int:
        """Tokens, the newest ones, that may still be taken back."""
        return len(self._held)

    @property
    def held(self) -> str:
        """Their text."""
        return "".join(held.text for held in self._held)

    def feed(self, place: int, text: str, state: State) -> str | Rewind[State]:
        """The text that is safe now, or a banned string. `state` is that before the token."""
        self._held.append(_Held(place, text, state))
        joined = fold(self.held)
        found = [at for at in map(joined.find, self._strings) if at >= 0]
        if not found:
            # All or nothing: what was held before was not safe by itself, and is not now.
            return "" if self._is_beginning(joined) else self.flush()
        first = self._token_at(min(found))
        back = self._held[first]
        taken = "".join(held.text for held in self._held[first:])
        del self._held[first:]
        return Rewind(back.place, back.state, taken)

    def flush(self) -> str:
        """Nothing follows: what was held is safe."""
        text = self.held
        self._held.clear()
        return text

    def _is_beginning(self, joined: str) -> bool:
        """A banned string may have begun at the end of it."""
        tails = [joined[at:] for at in range(max(0, len(joined) - self._longest + 1), len(joined))]
        return any(string.startswith(tail) for tail in tails for string in self._strings)

    def _token_at(self, at: int) -> int:
        """Which held token has the character."""
        end = 0
        for number, held in enumerate(self._held):
            end += len(held.text)
            if at < end:
                return number
        raise AssertionError("the character is in the held text")


def fold(text: str) -> str:
    """Lower case, each character by itself, so that places stay the same."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := c.lower()) == 1 else c for c in text)
