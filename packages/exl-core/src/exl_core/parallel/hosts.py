"""The forward pass of a host that has some of a model's layers.

The states of all rows go from each host to the next one, and the logits from the last host to
rank 0. If the matrices of a host are divided among several ranks, each of them sends its states,
which are equal, to the rank in the same place of the next host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from exl_core.arch.modules import LoraTarget, ModuleRow, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.batch import Batch
from exl_core.model.layers.state import PassState
from exl_core.model.layers.steps import Steps
from exl_core.model.observe import Observer
from exl_core.model.stage import Stage
from exl_core.model.weights import BlockWeights, ModelWeights
from exl_core.ops.table import OpTable
from exl_core.parallel.exchange import Exchange, wait_for
from exl_core.parallel.model import RankTransformer
from exl_core.parallel.plan import Grid
from exl_core.parallel.shares import Shares

_STATES, _LOGITS = 0, 1  # tags of the transfers


class WholeModel(NamedTuple):
    """The numbers of a model, and the layers of it that one host has."""

    config: ModelConfig
    layers: range


class Hops:
    """Transfers between the hosts, by the process group of all ranks."""

    def __init__(self, group: dist.ProcessGroup, grid: Grid, rank: int) -> None:
        self._group = group
        self._grid = grid
        self._rank = rank
        self.is_leader = rank == 0
        self.is_first = grid.host_of(rank) == 0
        self.is_last = grid.host_of(rank) == grid.hosts - 1
        # Ends once all ranks are connected.
        parts = [torch.zeros(1) for _ in range(grid.count)]
        wait_for(group.allgather([parts], [torch.zeros(1)]), rank)
        self._returns_logits = self.is_last and grid.rank_in_host(rank).index == 0

    def receive(self, rows: int, width: int) -> Tensor:
        """States [rows, width] after the layers of the host before."""
        return self._received(rows, width, self._rank - self._grid.local, _STATES)

    def pass_on(self, x: Tensor) -> None:
        """Sends the states after this host's layers to the next host."""
        self._send(x, self._rank + self._grid.local, _STATES)

    def return_logits(self, logits: Tensor) -> None:
        """Sends logits to rank 0, from the rank of the last host that has them."""
        if self._returns_logits and not self.is_leader:
            self._send(logits, 0, _LOGITS)

    def returned_logits(self, rows: int, width: int) -> Tensor:
        """Logits [rows, width] of the last host, on rank 0; no columns on other ranks."""
        if not self.is_leader:
            return torch.empty(rows, 0)
        return self._received(rows, width, self._grid.count - self._grid.local, _LOGITS)

    def _received(self, rows: int, width: int, source: int, tag: int) -> Tensor:
        found = torch.empty(rows, width)
        if rows:
            wait_for(self._group.recv([found], source, tag), self._rank)
        return found

    def _send(self, x: Tensor, target: int, tag: int) -> None:
        if len(x):
            wait_for(self._group.send([x.contiguous()], target, tag), self._rank)


class _PassingStage(Stage):
    """The layers of a host, whose states go to the next one."""

    def __init__(self, config: ModelConfig, layers: range, ops: OpTable, hops: Hops) -> None:
        super().__init__(config, layers, ops)
        self._hops = hops

    def run(
        self, x: Tensor, steps: Steps, blocks: Sequence[BlockWeights], state: PassState
    ) -> Tensor:
        x = super().run(x, steps, blocks, state)
        self._hops.pass_on(x)
        return x


class HostTransformer(RankTransformer):
    """A rank's part of a host's layers. All ranks run the same passes at the same time.

    `config` and `weights` are those of the host's layers (`layer_part`) of the model `whole`.
    Without `hops` they are the whole model.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: OpTable,
        exchange: Exchange,
        *,
        shares: Shares,
        sample_ids: tuple[int, ...] = (),
        hops: Hops | None = None,
        whole: WholeModel | None = None,
    ) -> None:
        super().__init__(config, weights, ops, exchange, shares=shares, sample_ids=sample_ids)
        self._hops = hops
        self._whole = whole
        if hops is not None and not hops.is_last:
            (stage,) = self.stages
            self.stages = (_PassingStage(self.config, stage.layers, ops, hops),)

    def run_stage(
        self,
        index: int,
        batch: Batch,
        store: KVStore,
        x: Tensor | None = None,
        *,
        observe: Observer | None = None,
    ) -> Tensor:
        if self._hops is not None:
            # Measured by a pass of its own, which must not come between this one's transfers.
            self._smoothing_for(store)
        return super().run_stage(index, batch, store, x, observe=observe)

    def check_pass(self, observe: Observer | None) -> None:
        """RequestError for a pass that the ranks cannot run."""
        if self._hops is not None and observe is not None:
            raise RequestError(
                "states of layers need the whole model on one host",
                expected="a model that is not divided among hosts",
            )

    @property
    def whole_config(self) -> ModelConfig:
        return super().whole_config if self._whole is None else self._whole.config

    def own_layer(self, layer: int) -> int | None:
        if self._whole is None:
            return super().own_layer(layer)
        layers = self._whole.layers
        return layer - layers.start if layer in layers else None

    def own_low_rank(
        self, target: LoraTarget, down: Tensor, up: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        return super().own_low_rank(target._replace(rows=self._own_rows(target)), down, up)

    def _own_rows(self, target: LoraTarget) -> tuple[ModuleRow, ...]:
        """The same matrices in the table of the host's layers, which have other numbers there."""
        if self._whole is None:
            return target.rows
        layers, table = self._whole.layers, module_table(self._shares.config).layers
        assert all(row.layer in layers for row in target.rows), "the caller has asked `own_layer`"
        return tuple(table[(row.layer or 0) - layers.start][row.role] for row in target.rows)

    def embed(self, token_ids: Tensor) -> Tensor:
        if self._hops is not None and not self._hops.is_first:
            return torch.empty(0, self.config.hidden_size)  # the first host has answered
        return super().embed(token_ids)

    def _embedding(self, batch: Batch) -> Tensor:
        if self._hops is None or self._hops.is_first:
            return super()._embedding(batch)
        return self._hops.receive(len(batch.token_ids), self.config.hidden_size)

    def _logits(self, x: Tensor, batch: Batch, observe: Observer | None) -> Tensor:
        hops = self._hops
        if hops is not None and not hops.is_last:
            return hops.returned_logits(len(batch.logit_rows), self.config.vocab_size)
        logits = super()._logits(x, batch, observe)
        if hops is not None:
            hops.return_logits(logits)
        return logits


def layer_part(config: ModelConfig, layers: range) -> tuple[ModelConfig, list[ModuleRow]]:
    """A model of some layers, and the tensors in the files of the whole one that it consists of.

    The part counts its layers from 0, and has the embedding and the head too.
    """
    part = replace(config, layers=config.layers[layers.start : layers.stop])
    part = replace(part, other_state_bytes=config.state_bytes - part.state_bytes)
    found = (row for row in module_table(config).rows if row.layer is None or row.layer in layers)
    rows = [
        replace(own, safetensors=row.safetensors, gguf=row.gguf)
        for own, row in zip(module_table(part).rows, found, strict=True)
    ]
    return part, rows
