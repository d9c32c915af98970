"""Vectors that replace token embeddings, such as those of an image encoder or another model.

Each span of vectors gets ids from `EMBEDDED_FROM` on that are unique in this process. Page tables,
prefix hashes and histories therefore handle them like token ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from exl_core.errors import RequestError

EMBEDDED_FROM = 1_000_000_000
"""First id of an embedded vector, far above the ids of any vocabulary."""

_next_id = EMBEDDED_FROM
_lock = Lock()


def _take_ids(count: int) -> int:
    global _next_id  # noqa: PLW0603 - ids are unique per process, like those of requests
    with _lock:
        first = _next_id
        _next_id += count
    return first


@dataclass(frozen=True, eq=False)
class EmbeddedSpan:
    """`vectors` [n, hidden_size] for consecutive positions, in this order.

    They are the direct input of the first block: a family that scales its token embeddings does not
    scale them. Stored as float32.
    """

    vectors: Tensor
    first_id: int = field(init=False)

    def __post_init__(self) -> None:
        vectors = self.vectors
        if vectors.dim() != 2 or not len(vectors) or not vectors.is_floating_point():
            raise RequestError(
                "embedded vectors have the wrong form",
                expected="floating point [at least 1, hidden_size]",
                got=f"{vectors.dtype} {list(vectors.shape)}",
            )
        vectors = vectors.detach().to("cpu", torch.float32).contiguous()
        if not torch.isfinite(vectors).all():
            raise RequestError("embedded vectors hold NaN or infinity")
        object.__setattr__(self, "vectors", vectors)
        object.__setattr__(self, "first_id", _take_ids(len(vectors)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids that represent the vectors in a prompt."""
        return tuple(range(self.first_id, self.first_id + len(self.vectors)))
