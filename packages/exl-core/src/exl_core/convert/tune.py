"""Tuning what the format leaves free, end to end, against the source's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.convert.plan import ConvertOptions
from exl_core.weights.checkpoint import Checkpoint


def tune_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    token_ids: Tensor,
    *,
    options: ConvertOptions,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """New values for some of `tensors` (all of the output, by name), of unchanged shapes and types:
    norms and `q_scale_max`. Empty for a model that is too large for the memory that is free."""
    raise NotImplementedError
