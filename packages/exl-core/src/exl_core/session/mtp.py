"""Finds the layer for multi-token prediction (MTP) in a model's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from exl_core.arch.modules import ModuleRow, module_table
from exl_core.arch.mtp import mtp_config, mtp_rows
from exl_core.arch.spec import ModelConfig
from exl_core.errors import UnsupportedModelError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.source import TensorSource
from exl_core.model.mtp import MtpLayer, read_mtp
from exl_core.model.transformer import Transformer

_COMPARED_ROWS = 128


class MtpFiles(NamedTuple):
    """The layer before it is read: its numbers, as a model of one layer, and its tensors."""

    config: ModelConfig
    checkpoint: Checkpoint

    @property
    def packed_bytes(self) -> int:
        """Bytes that its weights will take in memory."""
        return self.checkpoint.packed_bytes

    def read(self, target: Transformer, threads: int) -> MtpLayer:
        """Reads the weights to the device of the last layers of `target`."""
        weights = read_mtp(self.config, self.checkpoint, target.ops, threads)
        return MtpLayer(self.config, weights, target)


def find_mtp(
    source: TensorSource, config: ModelConfig
) -> tuple[ModelConfig, list[ModuleRow]] | None:
    """Numbers and tensors of the layer; None if the model or its files have none."""
    own = mtp_config(config)
    rows = [] if own is None else mtp_rows(own, source.format, source.tensors)
    return None if own is None or not rows else (own, rows)


def open_mtp(
    source: TensorSource,
    model: Checkpoint,
    config: ModelConfig,
    path: Path,
    make: Callable[[ModelConfig, Sequence[ModuleRow]], Checkpoint],
) -> MtpFiles:
    """The layer of the model of `config`, whose tensors are in `model`.

    `make` returns the tensors of rows. Embedding and head of the layer are left out where they are
    copies of the model's. UnsupportedModelError if there is no such layer.
    """
    found = find_mtp(source, config)
    if found is None:
        raise UnsupportedModelError(
            "the model has no layer for multi-token prediction"
            if config.arch.mtp is None
            else "the files have no layer for multi-token prediction",
            where=path,
            expected="a checkpoint with such a layer, for --mtp"
            if config.arch.mtp is None
            else "the layer of the original checkpoint, which some conversions drop",
            got=f"a {config.arch.name} model without one",
            next_step="Use --ngram, or --draft-model MODEL.",
        )
    own, rows = found
    checkpoint = make(own, rows)
    table, layer = module_table(config), module_table(own).layers[0]
    copies = {
        mine.name
        for mine, theirs in (
            (layer["mtp_embed"], table.embed),
            (layer["mtp_head"], table.embed if table.is_tied else table.head),
        )
        if mine in rows and not _differs(checkpoint, mine, model, theirs)
    }
    if copies:
        checkpoint = make(own, [row for row in rows if row.name not in copies])
    return MtpFiles(own, checkpoint)


def _differs(ours: Checkpoint, row: ModuleRow, theirs: Checkpoint, other: ModuleRow) -> bool:
    """Whether two matrices differ, in the first rows or in those in the middle."""
    count = row.shape[0]
    middle = count // 2 // _COMPARED_ROWS * _COMPARED_ROWS
    for first in (0, middle):
        last = min(count, first + _COMPARED_ROWS)
        one = ours.matrix(row.name).dense(first, last).float()
        if not torch.equal(one, theirs.matrix(other.name).dense(first, last).float()):
            return True
    return False
