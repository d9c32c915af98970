"""How much the loss feels an error in each output of each matrix, from gradients of the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.convert.plan import ConvertOptions
from exl_core.weights.checkpoint import Checkpoint

Sensitivity = Mapping[str, Tensor]
"""By the names of matrices; what the tensors mean is this package's business. Fit for a safetensors
file. An empty one means that nothing is known: errors are then taken relative to each output."""


def measure_sensitivity(
    checkpoint: Checkpoint,
    config: ModelConfig,
    token_ids: Tensor,
    *,
    options: ConvertOptions,
    on_row: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Of a model that fits into memory twice over; empty for one that does not."""
    raise NotImplementedError
