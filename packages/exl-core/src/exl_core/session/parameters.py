"""Counts the parameters of a checkpoint, and those that one token uses."""

from __future__ import annotations

from typing import NamedTuple

from exl_core.arch.layers import MoE
from exl_core.arch.spec import ModelConfig
from exl_core.formats.checkpoint import Checkpoint


class Parameters(NamedTuple):
    """All parameters; those that one token uses, and their bytes in the file. Of the experts, a
    token uses those chosen for it."""

    total: int
    active: int
    active_bytes: int


NO_PARAMETERS = Parameters(0, 0, 0)


def count_parameters(checkpoint: Checkpoint, config: ModelConfig) -> Parameters:
    total, active, size = 0, 0.0, 0.0
    for name, tensor in checkpoint.stored.items():
        row = checkpoint.rows[name]
        part = None if row.layer is None else config.layers[row.layer].feed_forward
        share = 1.0
        if row.expert is not None and isinstance(part, MoE):
            share = part.router.top_k / part.router.num_experts
        total += tensor.num_values
        active += share * tensor.num_values
        size += share * tensor.size_bytes
    return Parameters(total, round(active), round(size))
