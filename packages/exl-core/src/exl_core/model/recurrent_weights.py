"""Puts the weights of recurrent mixers together, by the module table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from exl_core.arch.layers import GatedDeltaNet, KimiDeltaNet, Mamba2, ShortConv, unsupported
from exl_core.arch.modules import ModuleRow, module_table
from exl_core.arch.parts import KIMI_TAPS
from exl_core.arch.spec import ModelConfig
from exl_core.model.source import WeightSource
from exl_core.model.weights import (
    DeltaNetWeights,
    KimiDeltaWeights,
    Mamba2Weights,
    RecurrentWeights,
    ShortConvWeights,
)
from exl_core.ops.elementwise import Gating, Norm, RmsNorm
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
    roles = [role for role in ("taps", *KIMI_TAPS) if role in rows]
    taps = _taps(source, [rows[role] for role in roles], has_silu=has_silu)
    shared = norm, wide, taps, narrow, norm_of("attention_post_norm")
    if isinstance(config.layers[layer].mixer, ShortConv):
        return ShortConvWeights(*shared)
    mixer_norm = RmsNorm(source.norm(rows["mixer_norm"]), config.norm_eps)
    match config.layers[layer].mixer:
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
            return DeltaNetWeights(*shared, Gating("silu", spec.value_dim, mixer_norm), rule)
        case KimiDeltaNet() as kimi:
            return KimiDeltaWeights(
                *shared,
                Gating("sigmoid", kimi.head_dim, mixer_norm),
                decay_up=source.packed(matrices["decay_up"]),
                gate_up=source.packed(matrices["gate_up_b"]),
                rule=DeltaRule(
                    key_heads=kimi.heads,
                    value_heads=kimi.heads,
                    key_dim=kimi.head_dim,
                    value_dim=kimi.head_dim,
                    decay=torch.exp(source.norm(rows["decay"])).flatten(),
                    dt_bias=source.norm(rows["step_bias"]),
                    is_by_row=True,
                ),
            )
        case Mamba2() as scan_spec:
            group = scan_spec.size // scan_spec.groups
            gating = Gating("silu", group, mixer_norm, is_gate_first=True)
            scan = _scan(scan_spec, source, rows["decay"], rows["step_bias"], rows["skip"])
            return Mamba2Weights(*shared, gating, scan)
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


def _taps(source: WeightSource, rows: Sequence[ModuleRow], *, has_silu: bool) -> Taps:
    """Taps of a convolution, transposed: the channels of a tap are next to each other. Of several
    rows, each has a part of the channels and no bias."""
    weight = torch.cat([source.norm(row) for row in rows]).T.contiguous()  # [T, C]
    bias = source.norm_bias(rows[0]) if len(rows) == 1 else None
    return Taps(weight, bias, has_silu)
