"""Reads the weights of a checkpoint to one device, or to the devices of a plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from exl_core.arch.modules import module_table
from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.formats.containers.source import Progress
from exl_core.formats.tensors import WeightTensors
from exl_core.model.build import build_weights, stream_weights
from exl_core.model.stage import StageTable
from exl_core.model.weights import ModelWeights
from exl_core.ops.open import device_failures, open_host_experts
from exl_core.ops.table import OpTable
from exl_core.session.split import StagePlan

_LOG = logging.getLogger("exl.load")


@dataclass(frozen=True, slots=True)
class Loading:
    """Reads the weights of a checkpoint to their devices."""

    config: ModelConfig
    checkpoint: WeightTensors
    path: Path
    threads: int
    progress: Progress | None
    embed_on_host: bool = False
    """The embedding stays in memory of the host, which a GPU reads from."""

    def read(
        self,
        plan: Sequence[StagePlan],
        tables: Mapping[str, OpTable],
        ops: OpTable,
        held: int | None,
    ) -> tuple[ModelWeights, tuple[StageTable, ...], OpTable]:
        """Weights, stages and the table of the last stage: `split` if there is a plan, or else
        `whole`, which has no stages."""
        if not plan:
            return self.whole(ops, held), (), ops
        weights, stages = self.split(plan, tables)
        return weights, stages, stages[-1].ops

    def whole(self, ops: OpTable, held: int | None) -> ModelWeights:
        """Weights on one device, of which at most `held` bytes stay in memory (None: all)."""
        checkpoint, table = self.checkpoint, module_table(self.config)
        at_once, needed = checkpoint.bytes_at_once, checkpoint.packed_bytes
        if self._is_on_host(ops):
            if table.is_tied:
                raise RequestError(
                    "the embedding of this model is its head too, which the GPU needs",
                    where=self.path,
                    got="--embeddings-on cpu",
                    next_step="Leave the option out.",
                )
            embed_bytes = checkpoint.packed_bytes_of(table.embed)
            at_once, needed = at_once - embed_bytes, needed - embed_bytes
        is_streamed = held is not None and held < needed
        if held is not None:
            needed = min(needed, max(at_once, held))
        check_memory(needed, free_memory_bytes(ops.device), self.path)
        if not is_streamed:
            return self._read(ops)
        with device_failures(ops.device, "loading the weights"):
            return stream_weights(
                self.config,
                checkpoint,
                ops,
                threads=self.threads,
                held_bytes=needed - at_once,
                embed_on_host=self._is_on_host(ops),
            )

    def _is_on_host(self, first: OpTable) -> bool:
        """Whether the embedding of a model whose first layers are on this device is not there."""
        return self.embed_on_host and first.device.type == "cuda"

    def split(
        self, plan: Sequence[StagePlan], tables: Mapping[str, OpTable]
    ) -> tuple[ModelWeights, tuple[StageTable, ...]]:
        """Weights on the devices of a plan, and the tables of its stages."""
        needed: dict[str, int] = {}
        for stage in plan:
            needed[stage.device] = needed.get(stage.device, 0) + stage.weights_bytes
            if stage.host_layers:
                needed["cpu"] = needed.get("cpu", 0) + stage.host_bytes
        for name, size in needed.items():
            free = free_memory_bytes(tables[name].device)
            check_memory(size, free, f"{self.path}, on {name}")
        stages = tuple(_stage_table(stage, tables) for stage in plan)
        return self._read(stages[-1].ops, stages), stages

    def _read(self, ops: OpTable, split: tuple[StageTable, ...] = ()) -> ModelWeights:
        devices = {ops.device, *(stage.ops.device for stage in split)}
        with device_failures(ops.device, "loading the weights"):
            weights = build_weights(
                self.config,
                self.checkpoint,
                ops,
                threads=self.threads,
                progress=self.progress,
                embed_on_host=self._is_on_host(split[0].ops if split else ops),
                split=split,
            )
            for device in devices:
                if device.type == "cuda":
                    # Kernels may read weights before earlier work on the stream has ended.
                    torch.cuda.synchronize(device)
            _LOG.debug("weights are read")
            return weights


def _stage_table(stage: StagePlan, tables: Mapping[str, OpTable]) -> StageTable:
    ops = tables[stage.device]
    if not stage.host_layers:
        return StageTable(stage.layers, ops)
    return StageTable(stage.layers, ops, open_host_experts(ops, tables["cpu"]), stage.host_layers)


def check_memory(needed: int, available: int | None, where: object) -> None:
    """Raises `OutOfMemoryError` if `needed` bytes exceed the `available` ones (None: unknown)."""
    if available is not None and needed > available:
        raise OutOfMemoryError(
            "the weights do not fit into memory",
            where=where,
            expected=f"{needed / 2**20:.0f} MiB",
            got=f"{available / 2**20:.0f} MiB free",
            next_step="Free some memory, or take a smaller model.",
        )
