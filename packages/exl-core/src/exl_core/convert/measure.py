"""Measuring one layer: what every candidate layout of every matrix would cost in quality."""

from __future__ import annotations

from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.convert.layers import LayerSource
from exl_core.convert.plan import ConvertOptions, LayerMeasurement
from exl_core.convert.sensitivity import Sensitivity


def measure_layer(
    source: LayerSource,
    config: ModelConfig,
    states: Tensor,
    sensitivity: Sensitivity,
    options: ConvertOptions,
) -> LayerMeasurement:
    """`states` float32 [rows, length, hidden] become those after the (unquantized) layer."""
    raise NotImplementedError
