"""One layer's weights as a checkpoint has them, in float32, and the states that layers exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Tensors of one layer by our full names (`model.layers.0.mlp.up_proj.weight`), float32:
    matrices [out, in], biases, and norms as factors. All of them are finite."""

    layer: int
    tensors: Mapping[str, Tensor]


def read_layer(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, device: torch.device
) -> LayerSource:
    """Raises WeightValueError, by name, for tensors that are not finite or exceed float16."""
    raise NotImplementedError


def embed_rows(checkpoint: Checkpoint, config: ModelConfig, token_ids: Tensor) -> Tensor:
    """What the first layer gets for token_ids int64 [rows, length]: float32 [rows, length, hidden],
    with the embedding as it will be stored, in float16."""
    raise NotImplementedError


@dataclass(slots=True)
class States:
    """Hidden states of the calibration rows between two layers, on the CPU, float32 [rows, length,
    hidden] each: as the source's layers made them, and as the quantized ones did.

    Together with the finished tensors they are all that a later layer depends on. The stages
    overwrite them in place; they may lie in mapped files.
    """

    source: Tensor
    quantized: Tensor
