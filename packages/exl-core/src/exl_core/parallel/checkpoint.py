"""The tensors of one rank of tensor parallelism, cut out of a checkpoint while they are read.

The matrices before a mixer are divided by columns (by heads, or by channels of a short
convolution), and so are gate and up, embedding and head (by tokens). The last matrices of mixers
and MLPs are divided by rows; their products are summed over the ranks. All else is whole on
every rank: norms, routers, matrices to latent vectors. Experts are divided like any MLP.

Gate and up follow the rows of their `down` matrix. With act-order these are scattered features, so
that no input is exchanged between the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from exl_core.arch.modules import ModuleRow, Shard
from exl_core.arch.spec import ModelConfig
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.runtime import RuntimeMatrix
from exl_core.formats.containers.source import StoredTensor
from exl_core.ops.weights import DenseLayout, WeightLayout
from exl_core.parallel.plan import Rank, share
from exl_core.parallel.shares import Shares
from exl_core.parallel.slices import SlicedMatrix, deal, slice_rows


class ShardedCheckpoint:
    """`WeightTensors` of one rank. `config` are the numbers of the whole model."""

    def __init__(self, whole: Checkpoint, config: ModelConfig, rank: Rank) -> None:
        self._whole = whole
        self._config = config
        self._rank = rank
        self.shares = Shares(config, rank)
        self._lock = Lock()
        self._layouts: dict[str, WeightLayout] = {}
        self.stored: dict[str, StoredTensor] = {
            name: _resized(tensor, self._shape(whole.rows[name]))
            for name, tensor in whole.stored.items()
        }

    @property
    def size_bytes(self) -> int:
        """Bytes in the files of the rank's parts of all tensors."""
        return sum(tensor.size_bytes for tensor in self.stored.values())

    @property
    def packed_bytes(self) -> int:
        """Bytes that the rank's weights will take in memory."""
        return sum(self.packed_bytes_of(row) for row in self._whole.rows.values())

    @property
    def bytes_at_once(self) -> int:
        """The same: no rank streams its weights."""
        return self.packed_bytes

    def packed_bytes_of(self, row: ModuleRow) -> int:
        """Bytes that the rank's part of a tensor will take in memory."""
        if row.is_matrix:
            return self._whole.matrix_bytes(row, self.layout(row.name))
        return self.stored[row.name].num_values * self._whole.dtype(row.name).itemsize

    def layout(self, name: str) -> WeightLayout:
        """Run-time layout of the rank's part, from headers and group tables only.

        The opened matrix may have other rows of each group.
        """
        if name not in self._layouts:
            self._layouts[name] = self._layout(name)
        return self._layouts[name]

    def _layout(self, name: str) -> WeightLayout:
        row, layout = self._whole.rows[name], self._whole.layout(name)
        out_features, in_features = self._shape(row)
        if row.shard is Shard.IN_FEATURES:
            layout = slice_rows(layout, torch.arange(in_features)).layout
        has_bias = layout.has_bias and self._adds_bias(row)
        return replace(layout, out_features=out_features, has_bias=has_bias)

    def bias_of(self, name: str) -> str | None:
        """Name of the bias that this rank adds; None if there is none."""
        return self._whole.bias_of(name) if self._adds_bias(self._whole.rows[name]) else None

    def matrix(self, name: str) -> RuntimeMatrix:
        """The rank's part of a matrix in its run-time form."""
        row, matrix = self._whole.rows[name], self._whole.matrix(name)
        match row.shard:
            case Shard.OUT_FEATURES:
                return SlicedMatrix(matrix, columns=self._columns(row))
            case Shard.IN_FEATURES:
                features = self._features(row, matrix)
                return SlicedMatrix(matrix, features=features, has_bias=self._adds_bias(row))
        return matrix

    def matrices(self, names: Sequence[str]) -> list[RuntimeMatrix]:
        """The rank's parts of several matrices."""
        return [self.matrix(name) for name in names]

    def vector(self, name: str) -> Tensor:
        """A bias of a norm or of a convolution, float32 [rows]."""
        return self._own_rows(self._whole.rows[name], self._whole.vector(name))

    def norm(self, name: str) -> Tensor:
        """Factors of a norm, numbers of each head, or taps of a convolution, float32; those of the
        rank's heads or channels."""
        return self._own_rows(self._whole.rows[name], self._whole.norm(name))

    def _own_rows(self, row: ModuleRow, values: Tensor) -> Tensor:
        """The rank's rows of a tensor that is no matrix."""
        rows = self.shares.mixer_rows(row)
        return values if rows is None else values[rows]

    def release(self, name: str, rows: slice | None = None) -> None:
        """Releases the process's memory for a tensor's part of the file, after reading. Ranges of
        rows are kept until the whole tensor is released, as other slices may share their pages."""
        if rows is None:
            self._whole.release(name)

    def release_all(self, names: Sequence[str]) -> None:
        """`release` of several whole tensors."""
        self._whole.release_all(names)

    def _adds_bias(self, row: ModuleRow) -> bool:
        """A bias after a sum over the ranks is added by one of them."""
        return row.shard is not Shard.IN_FEATURES or self._rank.index == 0

    def _shape(self, row: ModuleRow) -> tuple[int, ...]:
        """Shape of the rank's part of a matrix; that of the whole tensor for others."""
        own = self.shares.mixer_rows(row)
        if own is not None:
            width = len(own)
        elif row.shard is not None:
            width = len(share(row.shape[1 if row.shard is Shard.IN_FEATURES else 0], self._rank))
        match row.shard:
            case Shard.OUT_FEATURES:
                return (width, *row.shape[1:])
            case Shard.IN_FEATURES:
                return (row.shape[0], width)
        return row.shape

    def _features(self, row: ModuleRow, matrix: RuntimeMatrix | None = None) -> Tensor:
        """The rank's input features of a matrix whose products are summed, int64, ascending."""
        own = self.shares.mixer_rows(row)
        if own is not None:
            return own
        with self._lock:
            dealt = self.shares.dealt
            if row.name not in dealt:
                layout = self._whole.layout(row.name) if matrix is None else matrix.layout
                if matrix is None and not isinstance(layout, DenseLayout):
                    layout = self._whole.matrix(row.name).layout  # has the order of the rows
                ranks = (Rank(index, self._rank.count) for index in range(self._rank.count))
                sizes = [len(share(row.shape[1], rank)) for rank in ranks]
                dealt[row.name] = deal(layout, sizes)[self._rank.index]
            return dealt[row.name]

    def _columns(self, row: ModuleRow) -> Tensor:
        """The rank's columns of a matrix, int64, ascending."""
        down = self.shares.down_of(row)
        return self.shares.columns(row) if down is None else self._features(down)


def _resized(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """A part of a tensor with this shape, as far as its size matters."""
    part = replace(tensor, shape=shape)
    size = tensor.size_bytes * part.num_values // max(1, tensor.num_values)
    return replace(part, size_bytes=size)
