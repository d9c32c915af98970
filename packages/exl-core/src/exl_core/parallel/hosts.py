"""The forward pass of a host that has some of a model's layers.

The states of all rows go from each host to the next one, and the logits from the last host to
rank 0. If the matrices of a host are divided among several ranks, each of them sends its states,
which are equal, to the rank in the same place of the next host.

Transfers are made by gloo, from the host's memory to the host's memory. States of a GPU are copied
to pinned memory first, for which the host synchronizes. A captured graph has the layers of one host
only, and the transfers come before and after its replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.modules import LoraTarget, ModuleRow, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.batch import Batch
from exl_core.model.observe import Observer
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.stage import Stage
from exl_core.model.weights import ModelWeights
from exl_core.ops.table import OpTable
from exl_core.parallel.exchange import Exchange, GlooGroup
from exl_core.parallel.model import RankTransformer
from exl_core.parallel.peers import MAX_ROWS, PeerExchange
from exl_core.parallel.plan import Grid
from exl_core.parallel.shares import Shares

_STATES, _LOGITS = 0, 1  # tags of the transfers


class WholeModel(NamedTuple):
    """The numbers of a model, and the layers of it that one host has."""

    config: ModelConfig
    layers: range


class Hops:
    """Transfers between the hosts, by a group of all ranks."""

    def __init__(self, group: GlooGroup, grid: Grid, rank: int) -> None:
        self._group = group
        self._grid = grid
        self._rank = rank
        self.is_leader = rank == 0
        self.is_first = grid.host_of(rank) == 0
        self.is_last = grid.host_of(rank) == grid.hosts - 1
        # Ends once all ranks are connected.
        parts = [torch.zeros(1) for _ in range(grid.count)]
        group.wait_for_all(group.ranks.allgather([parts], [torch.zeros(1)]))
        self._returns_logits = self.is_last and grid.rank_in_host(rank).index == 0

    def receive(self, rows: int, width: int, device: torch.device) -> Tensor:
        """States [rows, width], float32, after the layers of the host before."""
        return self._received((rows, width), device, self._rank - self._grid.local, _STATES)

    def pass_on(self, x: Tensor) -> None:
        """Sends the states after this host's layers to the next host."""
        self._send(x, self._rank + self._grid.local, _STATES)

    def return_logits(self, logits: Tensor) -> None:
        """Sends logits to rank 0, from the rank of the last host that has them."""
        if self._returns_logits and not self.is_leader:
            self._send(logits, 0, _LOGITS)

    def returned_logits(self, rows: int, width: int, device: torch.device) -> Tensor:
        """Logits [rows, width], float32, of the last host, on rank 0; no columns on other ranks."""
        if not self.is_leader:
            return torch.empty(rows, 0, device=device)
        source = self._grid.count - self._grid.local
        return self._received((rows, width), device, source, _LOGITS)

    def _received(
        self, shape: tuple[int, int], device: torch.device, source: int, tag: int
    ) -> Tensor:
        found = torch.empty(shape, pin_memory=device.type == "cuda")
        if found.numel():
            self._group.wait_for(self._group.ranks.recv([found], source, tag))
        return found.to(device, non_blocking=True)

    def _send(self, x: Tensor, target: int, tag: int) -> None:
        if x.numel():
            self._group.wait_for(self._group.ranks.send([_on_host(x)], target, tag))


def _on_host(x: Tensor) -> Tensor:
    """Contiguous values in the host's memory. For those of a GPU, the host synchronizes."""
    if x.device.type == "cpu":
        return x.contiguous()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


class _LaterStage(Stage):
    """Layers of a host after the first one, whose ranks share memory.

    Passes through shared memory begin with an exchange that synchronizes the ranks
    (`exl/cuda/exchange.h`). On the first host that is the one of the embedding. Here, rank 0 sends
    the states that it has received, and the others send zeros.
    """

    def __init__(
        self, config: ModelConfig, layers: range, ops: OpTable, exchange: PeerExchange
    ) -> None:
        super().__init__(config, layers, ops)
        self._peers = exchange.peers
        is_own = int(exchange.rank.index == 0)
        self._is_own = torch.full((MAX_ROWS,), is_own, dtype=torch.int32, device=ops.device)

    def receive(self, x: Tensor) -> Tensor:
        x = super().receive(x)
        return self._peers.embed(x, self._is_own[: len(x)]) if self._peers.is_active else x


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
        self._is_replaying = False  # the caller receives states and passes them on
        if hops is not None and not hops.is_first and self._peers is not None:
            (stage,) = self.stages
            self.stages = (_LaterStage(self.config, stage.layers, ops, self._peers),)

    def run_stage(
        self,
        index: int,
        batch: Batch,
        store: KVStore,
        x: Tensor | None = None,
        *,
        observe: Observer | None = None,
    ) -> Tensor:
        if self._hops is None or self._is_replaying:
            return super().run_stage(index, batch, store, x, observe=observe)
        # Measured by a pass of its own, which must not come between this one's transfers.
        self._smoothing_for(store)
        if not self._hops.is_first:
            x = self._received(len(batch.token_ids))
        found = super().run_stage(index, batch, store, x, observe=observe)
        return self._handed_over(found, len(batch.logit_rows))

    @contextmanager
    def replaying(self, store: KVStore, segments: Sequence[Segment]) -> Iterator[Tensor | None]:
        received = None
        if self._hops is not None:
            self._smoothing_for(store)
            if not self._hops.is_first:
                received = self._received(sum(len(one.token_ids) for one in segments))
        self._is_replaying = True
        try:
            yield received
        finally:
            self._is_replaying = False

    def replayed(self, found: Tensor, segments: Sequence[Segment]) -> Tensor:
        return self._handed_over(found, sum(map(_num_logits, segments)))

    @property
    def has_head(self) -> bool:
        return self._hops is None or self._hops.is_last

    def _handed_over(self, found: Tensor, num_logits: int) -> Tensor:
        """The logits [num_logits, vocab_size] of a pass on rank 0. `found`: the states [R, hidden]
        after the layers of this host, or logits on the last one."""
        hops = self._hops
        if hops is None:
            return found
        if hops.is_last:
            hops.return_logits(found)
            return found
        hops.pass_on(found)
        return hops.returned_logits(num_logits, self.config.vocab_size, self.ops.device)

    def _received(self, rows: int) -> Tensor:
        assert self._hops is not None, "there is a host before"
        return self._hops.receive(rows, self.config.hidden_size, self.ops.device)

    def _pass_on(self, x: Tensor) -> None:
        if self._hops is not None and not self._hops.is_last:
            self._hops.pass_on(x)

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
            return torch.empty(0, self.config.hidden_size)  # the first host has the answer
        return super().embed(token_ids)

    def _embedding(self, batch: Batch) -> Tensor:
        if self._hops is None or self._hops.is_first:
            return super()._embedding(batch)
        return self._received(len(batch.token_ids))  # of the pass that measures key smoothing


def _num_logits(segment: Segment) -> int:
    """Rows of a segment that get logits."""
    counts = {LogitRows.ALL: len(segment.token_ids), LogitRows.LAST: 1}
    return counts.get(segment.logit_rows, 0)


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
