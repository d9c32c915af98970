"""Vectors that take the place of token embeddings: what an image or another model made.

A span of vectors has ids of its own, from `EMBEDDED_FROM` on, that no other span of this process
has. So they go through page tables, prefix hashes and histories like any token id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from torch import Tensor

EMBEDDED_FROM = 1_000_000_000
"""First id that stands for a vector; vocabularies end far below."""

_next_id = EMBEDDED_FROM
_lock = Lock()


def _take_ids(count: int) -> int:
    global _next_id  # noqa: PLW0603 - ids are the process's, like those of requests
    with _lock:
        first = _next_id
        _next_id += count
    return first


@dataclass(frozen=True, eq=False)
class EmbeddedSpan:
    """`vectors` float32 [n, hidden_size]; they stand at consecutive positions, in this order."""

    vectors: Tensor
    first_id: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_id", _take_ids(len(self.vectors)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What stands for the vectors in a prompt."""
        return tuple(range(self.first_id, self.first_id + len(self.vectors)))
