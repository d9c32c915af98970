"""Quantizing one layer, and the head, on what the quantized layers before them give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.convert.layers import LayerSource, States
from exl_core.convert.plan import Allocation, ConvertOptions, MatrixReport
from exl_core.convert.sensitivity import Sensitivity
from exl_core.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """Tensors as the file will hold them, by their names there, in its order; on the CPU."""

    tensors: Mapping[str, Tensor]
    reports: tuple[MatrixReport, ...]


def quantize_layer(
    source: LayerSource,
    config: ModelConfig,
    allocation: Allocation,
    states: States,
    *,
    sensitivity: Sensitivity,
    options: ConvertOptions,
) -> QuantizedPart:
    """All tensors of one layer. `states` become those after it."""
    raise NotImplementedError


def quantize_ends(
    checkpoint: Checkpoint, config: ModelConfig, states: States, options: ConvertOptions
) -> QuantizedPart:
    """Embedding, final norm and head, from the states after the last layer. A tied model gets a
    head of its own."""
    raise NotImplementedError
