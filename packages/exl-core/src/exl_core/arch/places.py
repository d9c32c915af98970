"""Places of tensors in files: rows of a stored tensor, and their permutation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class RowPermutation:
    """Rows of a matrix's heads in a file that stores them in another order than the model.

    rotary_dim  rows of each head, from row `before` on, that the file stores as interleaved RoPE
                pairs. Its pairs are rows (2i, 2i + 1), the model's are (i, i + rotary_dim/2) of
                these. 0: none.
    group       heads that the file stores one after the other
    stride      heads from the first one of a group to the first one of the next group
    step        the same in rows, where it is not a whole number of heads; 0: as `stride` says
    before      rows of each head before the rotated ones
    """

    num_heads: int
    head_dim: int
    rotary_dim: int
    group: int = 1
    stride: int = 1
    step: int = 0
    before: int = 0

    def stored_rows(self) -> list[int]:
        """Row in the file of each of the model's rows."""
        rows = range(self.head_dim)
        rotated = rows[self.before : self.before + self.rotary_dim]
        rest = rows[self.before + self.rotary_dim :]
        head = [*rows[: self.before], *rotated[::2], *rotated[1::2], *rest]
        return [first + row for first in self._firsts() for row in head]

    def model_rows(self) -> list[int]:
        """The model's row of each row in the file: the inverse of `stored_rows`. The file must have
        nothing between the groups."""
        first, half = self.before, self.rotary_dim // 2
        pairs = chain.from_iterable((first + i, first + i + half) for i in range(half))
        head = [*range(first), *pairs, *range(first + 2 * half, self.head_dim)]
        return [first + row for first in self._firsts() for row in head]

    def _firsts(self) -> Iterator[int]:
        """First row of each head in the file."""
        for head in range(self.num_heads):
            group, place = divmod(head, self.group)
            step = self.step or self.stride * self.head_dim
            yield group * step + place * self.head_dim


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a file may store a tensor: rows from `first_row` on of the tensor `name`.

    `num_rows` counts all rows of the stored tensor. `permutation` is that of its rows, None for the
    model's order. `addend` is added to the stored values. A tensor that holds the matrices of
    several experts has three dimensions, of which the first is `experts`, or these matrices one
    below the other. Its rows are those of all experts. A bias of experts has two dimensions. A
    tensor that `is_transposed` stores its matrices as [in_features, out_features], and its rows are
    the columns of these. One that `may_be_transposed` does if it does not have the other shape. A
    tensor that `is_decay` stores -exp(value).
    """

    name: str
    first_row: int
    num_rows: int
    permutation: RowPermutation | None = None
    addend: float = 0.0
    experts: int = 0
    is_transposed: bool = False
    may_be_transposed: bool = False
    is_decay: bool = False

    def columns(self, in_features: int) -> tuple[slice, int]:
        """The rows of the file that hold this part of a transposed tensor, and its first column in
        them. Other columns of the rows belong to other parts."""
        expert, column = divmod(self.first_row, self.num_rows // max(1, self.experts))
        return slice(expert * in_features, (expert + 1) * in_features), column

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored tensor that a part of this shape belongs to."""
        rows = self.num_rows // max(1, self.experts)
        matrix = (shape[1], rows) if self.is_transposed else (rows, *shape[1:])
        return (self.experts, *matrix) if self.experts else matrix
