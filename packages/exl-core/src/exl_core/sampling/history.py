"""The history of one reply as an array: converting it anew for every token would cost more than the
rest of the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class History:
    """Follows a list that grows at its end and is cut back only through `rewind`."""

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._count = 0
        # Distinct ids in the order of their first place in the list, and that place.
        self._distinct = np.empty(256, dtype=np.int64)
        self._first_places: list[int] = []
        self._seen: set[int] = set()

    def follow(self, history: Sequence[int]) -> npt.NDArray[np.int64]:
        """The list as an array, to be read before the next call."""
        length = len(history)
        if length < self._count:
            self.rewind(length)
        if length > self._count:
            self._ids = _with_room(self._ids, self._count, length)
            new = history[self._count :]
            self._ids[self._count : length] = new
            self._distinct = _with_room(
                self._distinct, len(self._first_places), len(self._first_places) + len(new)
            )
            for place, token_id in enumerate(new, self._count):
                if token_id not in self._seen:
                    self._seen.add(token_id)
                    self._distinct[len(self._first_places)] = token_id
                    self._first_places.append(place)
            self._count = length
        return self._ids[:length]

    @property
    def distinct(self) -> npt.NDArray[np.int64]:
        """The ids of what was followed last, each once."""
        return self._distinct[: len(self._first_places)]

    def rewind(self, length: int) -> None:
        self._count = min(self._count, length)
        while self._first_places and self._first_places[-1] >= self._count:
            self._first_places.pop()
            self._seen.discard(int(self._distinct[len(self._first_places)]))


def _with_room(ids: npt.NDArray[np.int64], used: int, length: int) -> npt.NDArray[np.int64]:
    if length <= len(ids):
        return ids
    grown = np.empty(2 * length, dtype=np.int64)
    grown[:used] = ids[:used]
    return grown
