"""Outputs and input features that one rank has of each divided matrix.

A rank has whole heads of a mixer or some of its channels, ranges of the vocabulary, and of each MLP
the features that `ShardedCheckpoint` deals to it when it reads the `down` matrix. Gate and up
follow that matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.arch.modules import LoraTarget, ModuleRow, Shard, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.parallel.mixer_shares import mixer_rows
from exl_core.parallel.plan import Rank, share, share_config

_DOWN = {
    "gate": "down",
    "up": "down",
    "expert_gate": "expert_down",
    "expert_up": "expert_down",
    "shared_gate": "shared_down",
    "shared_up": "shared_down",
}
"""Matrices whose columns are the input features of another one."""


class Shares:
    """One rank's part of every matrix. `config` are the numbers of the whole model.

    dealt  input features of each `down` matrix by its name, int64, ascending.
           `ShardedCheckpoint` adds them when it reads the matrix
    """

    def __init__(self, config: ModelConfig, rank: Rank) -> None:
        self.config = config
        self.rank = rank
        self.dealt: dict[str, Tensor] = {}
        self._table = module_table(config)
        self._own_table = module_table(share_config(config, rank))

    def mixer_rows(self, row: ModuleRow) -> Tensor | None:
        """The rank's rows of a tensor of a mixer, int64, or its input features of the last matrix
        of one. None for other tensors, and for those that are whole on every rank."""
        if row.layer is None:
            return None
        return mixer_rows(self.config.layers[row.layer].mixer, row, self.rank)

    def down_of(self, row: ModuleRow) -> ModuleRow | None:
        """The matrix that reads the outputs of `row`, a gate or up matrix; None for others."""
        if row.role not in _DOWN:
            return None
        assert row.layer is not None, "an MLP belongs to a layer"
        layer = self._table.layers[row.layer]
        rows = layer if row.expert is None else self._table.experts[row.layer][row.expert]
        return rows[_DOWN[row.role]]

    def columns(self, row: ModuleRow) -> Tensor:
        """The rank's outputs of a matrix that is divided by columns, int64, ascending."""
        down = self.down_of(row)
        if down is not None:
            return self.features(down)
        own = self.mixer_rows(row)
        if own is not None:
            return own
        return _indices(share(row.shape[0], self.rank))

    def features(self, row: ModuleRow) -> Tensor:
        """The rank's input features of a matrix whose products are summed, int64, ascending."""
        own = self.mixer_rows(row)
        return self.dealt[row.name] if own is None else own

    def low_rank(self, target: LoraTarget, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor, int]:
        """The rank's part of an adapter's pair for matrices of a layer: down [in_features, r], up
        [r, out_features] in the model's order, and the first output of the rank's packed matrix
        that it is added to.

        A pair of a matrix that is divided by rows adds to the partial products, before their sum.
        """
        first = target.rows[0]
        assert first.layer is not None, "embedding and head are not divided"
        if first.shard is Shard.IN_FEATURES:
            return down[self.features(first)].contiguous(), up, first.first_out
        if first.shard is Shard.OUT_FEATURES:
            own = [self.columns(row) + row.first_out - first.first_out for row in target.rows]
            up = up[:, torch.cat(own)].contiguous()
        return down, up, self._own_table.layers[first.layer][first.role].first_out


def _indices(part: range) -> Tensor:
    return torch.arange(part.start, part.stop)
