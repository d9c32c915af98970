"""MXFP4: meaning of the 4-bit floats of several matrices and their scales, and their exact values.

    blocks  uint8 [..., N, K / 32, 16]  32 codes of E2M1, two in a byte, the first in the low half
    scales  uint8 [..., N, K / 32]      exponents of 2, biased by 127 (E8M0)

    w[n, k] = 2^(scales[n, k / 32] - 127) * MXFP4[code[n, k]]

OCP Microscaling Formats 1.0. Dimensions before N count matrices, whose rows are one after the
other. Knows neither files nor models; the caller handles the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.errors import WeightShapeError
from exl_core.formats.codecs import bits as bitstream
from exl_core.ops.weights import EXPONENT_BIAS, MXFP4

PARTS = ("blocks", "scales")
BITS = 4
GROUP_ROWS = 32
BLOCK_BYTES = 16
MATRIX = 2  # number of dimensions


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Linear:
    """Tensors of all matrices, as validated by `check`."""

    blocks: Tensor  # [N, K / 32, 16], with N of all matrices
    scales: Tensor  # [N, K / 32]

    @property
    def in_features(self) -> int:
        return self.blocks.shape[1] * GROUP_ROWS

    @property
    def out_features(self) -> int:
        return self.blocks.shape[0]


def check(parts: Mapping[str, Tensor], where: object) -> Mxfp4Linear:
    """Validates the tensors of the matrices. Errors name the tensor at fault."""
    rank = parts["blocks"].dim()
    blocks = bitstream.take(parts, "blocks", max(rank, MATRIX + 1), (torch.uint8,), where)
    scales = bitstream.take(parts, "scales", blocks.dim() - 1, (torch.uint8,), where)
    if blocks.shape[-1] != BLOCK_BYTES:
        raise WeightShapeError(
            "tensor 'blocks' has no blocks of 32 codes",
            where=where,
            expected=f"{BLOCK_BYTES} bytes each",
            got=list(blocks.shape),
        )
    reason = f"'blocks' is {list(blocks.shape)}"
    bitstream.require_shape(scales, "scales", tuple(blocks.shape[:-1]), reason, where)
    return Mxfp4Linear(blocks.flatten(0, -3), scales.flatten(0, -2))


def codes_of(blocks: Tensor) -> Tensor:
    """Codes, uint8 [..., K], of blocks [..., K / 32, 16]."""
    return torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3)


def dequantize(linear: Mxfp4Linear, rows: Tensor) -> Tensor:
    """Exact weights of these rows (int64), float32 [rows, in_features]."""
    numbers = torch.tensor(MXFP4)[codes_of(linear.blocks[rows]).long()]
    exponents = linear.scales[rows].repeat_interleave(GROUP_ROWS, 1).int() - EXPONENT_BIAS
    return torch.ldexp(numbers.double(), exponents.double()).float()
