"""History of one reply as an array, updated incrementally.

Converting the list again for every token would cost more than the rest of the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class History:
    """Mirror of a list that only grows at its end, or is cut with `rewind`."""

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._count = 0
        # Distinct ids in the order of their first occurrence in the list, and its index.
        self._distinct = np.empty(256, dtype=np.int64)
        self._first_indices: list[int] = []
        self._seen: set[int] = set()

    def follow(self, history: Sequence[int]) -> npt.NDArray[np.int64]:
        """The list as an array, valid until the next call."""
        length = len(history)
        if length < self._count:
            self.rewind(length)
        if length > self._count:
            self._ids = _grown(self._ids, self._count, length)
            new = history[self._count :]
            self._ids[self._count : length] = new
            self._distinct = _grown(
                self._distinct, len(self._first_indices), len(self._first_indices) + len(new)
            )
            for index, token_id in enumerate(new, self._count):
                if token_id not in self._seen:
                    self._seen.add(token_id)
                    self._distinct[len(self._first_indices)] = token_id
                    self._first_indices.append(index)
            self._count = length
        return self._ids[:length]

    @property
    def distinct(self) -> npt.NDArray[np.int64]:
        """Ids of the latest list, each once."""
        return self._distinct[: len(self._first_indices)]

    def rewind(self, length: int) -> None:
        self._count = min(self._count, length)
        while self._first_indices and self._first_indices[-1] >= self._count:
            self._first_indices.pop()
            self._seen.discard(int(self._distinct[len(self._first_indices)]))


def _grown(ids: npt.NDArray[np.int64], used: int, length: int) -> npt.NDArray[np.int64]:
    if length <= len(ids):
        return ids
    grown = np.empty(2 * length, dtype=np.int64)
    grown[:used] = ids[:used]
    return grown
