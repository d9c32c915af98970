"""Puts the weights of recurrent mixers together, by the module table."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from exl_core.arch.layers import GatedDeltaNet, Mamba2, ShortConv, unsupported
from exl_core.arch.modules import ModuleRow, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.model.source import WeightSource
from exl_core.model.weights import (
    DeltaNetWeights,
    Mamba2Weights,
    RecurrentWeights,
    ShortConvWeights,
)
from exl_core.ops.elementwise import Norm, RmsNorm
from exl_core.ops.recurrent import DeltaRule, StateScan, Taps


def recurrent_weights(
    config: ModelConfig, layer: int, source: WeightSource, norm_of: Callable[[str], Norm | None]
) -> RecurrentWeights:
    """Weights of a layer's recurrent mixer. `norm_of` gives the layer's norms by role."""
    table = module_table(config)
    rows, matrices = table.layers[layer], table.packed(layer)
    norm = norm_of("attention_norm")
    wide, narrow = source.packed(matrices["mixer_in"]), source.packed(matrices["mixer_out"])
    has_silu = not isinstance(config.layers[layer].mixer, ShortConv)
    taps = _taps(source, rows["taps"], has_silu=has_silu)
    shared = norm, wide, taps, narrow, norm_of("attention_post_norm")
    match config.layers[layer].mixer:
        case ShortConv():
            return ShortConvWeights(*shared)
        case GatedDeltaNet() as spec:
            rule = DeltaRule(
                key_heads=spec.key_heads,
                value_heads=spec.value_heads,
                key_dim=spec.key_dim,
                value_dim=spec.value_dim,
                decay=torch.exp(source.norm(rows["decay"])),
                dt_bias=source.norm(rows["step_bias"]),
                is_tiled=spec.is_tiled,
            )
            head_norm = RmsNorm(source.norm(rows["mixer_norm"]), config.norm_eps)
            return DeltaNetWeights(*shared, rule, head_norm)
        case Mamba2() as scan_spec:
            factors = source.norm(rows["mixer_norm"])
            plain = torch.ones(scan_spec.size // scan_spec.groups, device=source.device)
            scan = _scan(scan_spec, source, rows["decay"], rows["step_bias"], rows["skip"])
            return Mamba2Weights(*shared, scan, RmsNorm(plain, config.norm_eps), factors)
        case other:
            raise unsupported("mixer", other)


def _scan(
    spec: Mamba2, source: WeightSource, decay: ModuleRow, bias: ModuleRow, skip: ModuleRow
) -> StateScan:
    least, largest = spec.steps
    return StateScan(
        heads=spec.heads,
        head_dim=spec.head_dim,
        state_size=spec.state_size,
        groups=spec.groups,
        decay=torch.exp(source.norm(decay)),
        dt_bias=source.norm(bias),
        skip=source.norm(skip),
        steps=(least, math.inf if largest is None else largest),
    )


def _taps(source: WeightSource, row: ModuleRow, *, has_silu: bool) -> Taps:
    """Taps of a convolution, transposed: the channels of a tap are next to each other."""
    weight = source.norm(row).T.contiguous()  # [T, C]
    return Taps(weight, source.norm_bias(row), has_silu)
