"""Run-time form of EXL3 matrices: the trellis as stored, and the scales around it.

A matrix of the model is the whole stored one without its padding, or consecutive columns of it.
Columns in another order have exact values only, because an op table cannot reorder them.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.exl3.layout import Exl3Linear
from exl_core.formats.codecs.runtime import Move, StoredColumns, stay
from exl_core.ops.weights import HADAMARD, TILE, Codebook, TrellisColumns, TrellisLayout


class Exl3Matrix:
    """Columns of a layer, with `in_features` rows: `out_features` of them, from `first_column` on,
    or those that `stored_columns` lists."""

    def __init__(
        self,
        linear: Exl3Linear,
        out_features: int,
        in_features: int,
        *,
        first_column: int = 0,
        stored_columns: Tensor | None = None,
    ) -> None:
        self._linear = linear
        self._columns = StoredColumns(first_column, stored_columns)
        self.layout = layout_of(
            out_features, in_features, linear.tile_words, linear.codebook, first_column
        )

    def columns(self, first: int, last: int, move: Move = stay) -> TrellisColumns:
        layout, linear = self.layout, self._linear
        assert (first, last) == (0, layout.out_features), "a trellis is read as a whole"
        assert self._columns.stored is None, "columns in another order are read as exact values"
        stored, _ = self._columns.span(first, last, HADAMARD)
        words, out_scales = linear.trellis, linear.svh
        if (stored.start, stored.stop) != (0, linear.out_features):
            words = words[:, stored.start // TILE : stored.stop // TILE]
            out_scales = out_scales[stored]
        return TrellisColumns(move(words), move(linear.suh), move(out_scales))

    def dense(self, first: int, last: int) -> Tensor:
        stored, inner = self._columns.span(first, last, HADAMARD)
        columns = exl3.dequantize(self._linear, stored.start, stored.stop)[:, inner]
        return columns[: self.layout.in_features].T.contiguous()


@lru_cache(maxsize=256)  # a model has few different layouts, and up to 20 thousand matrices
def layout_of(
    out_features: int, in_features: int, tile_words: int, codebook: Codebook, first_column: int
) -> TrellisLayout:
    """Layout of the columns from `first_column` on of a stored matrix."""
    return TrellisLayout(
        out_features, in_features, tile_words, codebook, first_out=first_column % HADAMARD
    )


def stored_size(features: int) -> int:
    """Features of a stored matrix: those of the model, padded to blocks of 128."""
    return -(-features // HADAMARD) * HADAMARD
