"""Trellis codes of single matrices: nearest rings, feedback, scales, padding."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.convert.ldlq import TrellisQuantizer, TrellisWeights
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.ops.backends.rings import TorchRingOps

RINGS = TorchRingOps()


def quantized(weight: Tensor, hessian: Tensor, rate: float) -> TrellisWeights:
    return TrellisQuantizer(hessian, RINGS).quantize(weight, rate, "mul1")


def test_padded_columns_and_columns_of_zeros_are_exactly_zero() -> None:
    weight = torch.randn(16, 20, generator=torch.Generator().manual_seed(1))
    weight[:, 7] = 0

    result = quantized(weight, torch.eye(16), 4)

    assert result.linear.trellis.shape == (8, 8, 64)
    dense = exl3.dequantize(result.linear, 0, 128)
    assert not dense[:, 20:].any()
    assert not dense[:, 7].any()
    assert torch.equal(dense[:16, :20], result.weight)
    assert (result.weight - weight).norm() < 0.2 * weight.norm()
