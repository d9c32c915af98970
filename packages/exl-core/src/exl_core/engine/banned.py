"""Banned strings in streamed text: which text is safe to emit, and how far to rewind.

Matching ignores case. Text is held back token by token, from the token in which a banned string may
have begun. If the string is completed, the reply is rewound to before that token, none of whose
text has been emitted. A completed string takes precedence over a possible one; of several completed
strings, the one that begins first counts.

Text that later tokens have made harmless is still held while those tokens may be taken back: the
emitted text never ends with the beginning of a banned string.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State")


class Rewind(NamedTuple, Generic[State]):
    """Request to rewind to before the token at `position`; the decoder was then in `state`."""

    position: int
    state: State
    text: str
    """Text of the tokens that are taken back."""


@dataclass(slots=True)
class _Held(Generic[State]):
    position: int
    text: str
    state: State


class BannedStrings(Generic[State]):
    """Matcher of one reply. `State` is the caller's snapshot for rewinding, kept as it is."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = tuple(fold(string) for string in strings)
        self._longest = max(map(len, self._strings), default=0)
        self._held: list[_Held[State]] = []

    @property
    def num_held(self) -> int:
        """Number of newest tokens that may still be taken back."""
        return len(self._held)

    @property
    def held(self) -> str:
        """Text of these tokens."""
        return "".join(held.text for held in self._held)

    def feed(self, position: int, text: str, state: State) -> str | Rewind[State]:
        """Add a token's text; return text that is safe now, or a rewind.

        `state` is the snapshot from before the token.
        """
        self._held.append(_Held(position, text, state))
        joined = fold(self.held)
        found = [at for at in map(joined.find, self._strings) if at >= 0]
        if not found:
            # All or nothing: a part of the held text was not safe alone before, and is not now.
            return "" if self._is_beginning(joined) else self.flush()
        first = self._token_at(min(found))
        start = self._held[first]
        removed = "".join(held.text for held in self._held[first:])
        del self._held[first:]
        return Rewind(start.position, start.state, removed)

    def flush(self) -> str:
        """Return the held text, which is safe because the reply ends here."""
        text = self.held
        self._held.clear()
        return text

    def _is_beginning(self, joined: str) -> bool:
        """Whether the text ends with the beginning of a banned string."""
        tails = [joined[at:] for at in range(max(0, len(joined) - self._longest + 1), len(joined))]
        return any(string.startswith(tail) for tail in tails for string in self._strings)

    def _token_at(self, at: int) -> int:
        """Index of the held token that contains the character at `at`."""
        end = 0
        for number, held in enumerate(self._held):
            end += len(held.text)
            if at < end:
                return number
        raise AssertionError("the character is in the held text")


def fold(text: str) -> str:
    """Lower-case each character by itself, so that character positions do not change."""
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := c.lower()) == 1 else c for c in text)
