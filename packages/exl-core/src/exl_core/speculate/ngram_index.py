"""Index of earlier occurrences of the last few tokens of a sequence. It knows token ids only.

For each context length from `min_match` to `max_match` the index stores the newest position that
follows each context, and a link from each position to the previous one with the same context.
Adding or removing a token costs one dictionary access per length, independent of sequence length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

LONGEST_COMPARED = 32
"""Longest match length that is distinguished; longer matches predict no better."""

_CANDIDATES = 8
"""Occurrences that are examined, newest first."""


class Match(NamedTuple):
    """`tokens[position]` follows `length` tokens that equal the newest tokens of the sequence."""

    tokens: Sequence[int]
    position: int
    length: int

    def follow(self, count: int) -> list[int]:
        """The `count` tokens from `position` on.

        Past the newest token the guess repeats itself, as a periodic sequence does.
        """
        guess = list(self.tokens[self.position : self.position + count])
        period = len(guess)
        while len(guess) < count:
            guess.append(guess[-period])
        return guess


class _Order:
    """Positions by context, for contexts of one length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.newest: dict[tuple[int, ...], int] = {}
        self.earlier = array("q")  # by position; 0 for none, because no context ends at 0

    def extend(self, tokens: list[int]) -> None:
        length, newest, earlier = self.length, self.newest, self.earlier
        for position in range(len(earlier), len(tokens)):
            if position < length:
                earlier.append(0)
                continue
            context = tuple(tokens[position - length : position])
            earlier.append(newest.get(context, 0))
            newest[context] = position

    def rewind(self, tokens: list[int], count: int) -> None:
        length, newest, earlier = self.length, self.newest, self.earlier
        while len(earlier) > count:
            before = earlier.pop()
            position = len(earlier)
            if position < length:
                continue
            context = tuple(tokens[position - length : position])
            if before:
                newest[context] = before
            else:
                del newest[context]


class NgramIndex:
    """Indexed sequence that grows at its end and can be rewound."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.tokens: list[int] = []
        self._max_match = max_match
        self._orders = [_Order(length) for length in range(max_match, min_match - 1, -1)]

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)
        for order in self._orders:
            order.extend(self.tokens)

    def rewind(self, count: int) -> None:
        """Keep the first `count` tokens."""
        for order in self._orders:
            order.rewind(self.tokens, count)
        del self.tokens[count:]

    def find(self, history: list[int]) -> Match | None:
        """Best match for the end of `history`, which may be this sequence or another one.

        The longest context wins, then the most frequent recent continuation, then the newest.
        """
        for order in self._orders:
            if order.length <= len(history):
                position = order.newest.get(tuple(history[-order.length :]), 0)
                if position:
                    return self._best(order, position, history)
        return None

    def _best(self, order: _Order, position: int, history: list[int]) -> Match:
        tokens = self.tokens
        is_longest = order.length == self._max_match
        counts: dict[int, int] = {}
        found: list[tuple[int, int]] = []  # (length, position)
        while position and len(found) < _CANDIDATES:
            length = order.length
            if is_longest:
                length = self._length_at(position, history)
                if length == LONGEST_COMPARED:
                    return Match(tokens, position, length)
            found.append((length, position))
            token_id = tokens[position]
            counts[token_id] = counts.get(token_id, 0) + 1
            position = order.earlier[position]
        length, position = max(found, key=lambda at: (at[0], counts[tokens[at[1]]], at[1]))
        return Match(tokens, position, length)

    def _length_at(self, position: int, history: list[int]) -> int:
        tokens, longest = self.tokens, LONGEST_COMPARED
        if position >= longest and tokens[position - longest : position] == history[-longest:]:
            return longest
        length = self._max_match
        limit = min(position, len(history), longest)
        while length < limit and tokens[position - 1 - length] == history[-1 - length]:
            length += 1
        return length
