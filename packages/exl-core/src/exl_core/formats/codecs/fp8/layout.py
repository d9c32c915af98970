"""FP8: meaning of one matrix of 8-bit floats and its scales, and their exact values.

    weight            float8_e4m3fn [N, K]
    weight_scale_inv  float, or `weight_scale`: one number, [N], [N, 1], or one number per block,
                      [ceil(N / rows), ceil(K / columns)]

    w[n, k] = weight[n, k] * scale

Despite its name, `weight_scale_inv` is multiplied, not divided by. The method "fp8" (DeepSeek,
Qwen) and the formats "float-quantized" and "naive-quantized" of compressed-tensors store matrices
so. The quantization of activations that a configuration asks for is not applied. Knows neither
files nor models; the caller handles the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from exl_core.arch.fields import Fields
from exl_core.errors import ConfigError, UnsupportedModelError, WeightFileError, WeightShapeError
from exl_core.formats.codecs import bits as bitstream
from exl_core.formats.codecs.runtime import check_scales

PARTS = ("weight", "weight_scale_inv", "weight_scale")
STORAGE = "F8_E4M3"  # of `weight` in safetensors files
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MATRIX = 2  # number of dimensions
Block = tuple[int, int]


def parse_block(config: Mapping[str, object], where: object) -> Block | None:
    """Rows and columns of a block, from `quantization_config` of the method "fp8"; None if the
    scales have no blocks."""
    fields = Fields(config, where)
    kind = fields.text("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError(
            "8-bit floats of this kind are not supported", where=where, expected="e4m3", got=kind
        )
    block = config.get("weight_block_size")
    if block is None:
        return None
    if isinstance(block, list) and len(block) == MATRIX:
        rows, columns = block
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(
        "'weight_block_size' has no usable value",
        where=where,
        expected="two positive integers",
        got=block,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear:
    """Tensors of one matrix, as validated by `check`. A block of the scales has `block_rows` rows
    and `group_rows` columns of the weight."""

    weight: Tensor  # [N, K]
    scales: Tensor  # [row blocks, groups]
    block_rows: int
    group_rows: int

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def row_scales(self, rows: Tensor) -> Tensor:
        """Scales of these rows of the weight, float32 [rows, groups]."""
        return self.scales.float()[rows // self.block_rows]


def group_rows(in_features: int, scale_shape: tuple[int, ...], block: Block | None) -> int:
    """Input features that share a scale."""
    if block is None or len(scale_shape) != MATRIX or prod(scale_shape) == 1:
        return in_features
    return min(block[1], in_features)


def check(parts: Mapping[str, Tensor], block: Block | None, where: object) -> Fp8Linear:
    """Validates the tensors of a matrix. Errors name the tensor at fault."""
    weight = bitstream.take(parts, "weight", 2, (torch.float8_e4m3fn,), where)
    names = [name for name in PARTS[1:] if parts.get(name) is not None]
    if len(names) > 1:
        raise WeightFileError(
            f"tensors {names[0]!r} and {names[1]!r} are both there", where=where, expected="one"
        )
    name = names[0] if names else PARTS[1]
    stored = parts.get(name)
    rank = 1 if stored is None else max(1, stored.dim())  # one number may have no dimensions
    flat = parts if stored is None else {**parts, name: stored.reshape(stored.shape or (1,))}
    scales = bitstream.take(flat, name, rank, FLOATS, where)
    check_scales(scales, name, where)
    rows, columns = weight.shape
    if scales.numel() == 1:
        return Fp8Linear(weight, scales.view(1, 1), rows, columns)
    if tuple(scales.shape) in ((rows,), (rows, 1)) and (block is None or scales.dim() == 1):
        return Fp8Linear(weight, scales.view(rows, 1), 1, columns)
    if block is None:
        raise WeightShapeError(
            f"tensor {name!r} does not go with 'weight'",
            where=where,
            expected=f"one number, or one for each of {rows} rows",
            got=tuple(scales.shape),
        )
    expected = -(-rows // block[0]), -(-columns // block[1])
    reason = f"'weight' is {rows} x {columns}, in blocks of {block[0]} x {block[1]}"
    bitstream.require_shape(scales, name, expected, reason, where)
    return Fp8Linear(weight, scales, block[0], min(block[1], columns))


def dequantize(linear: Fp8Linear, rows: Tensor) -> Tensor:
    """Exact weights of these rows (int64), float32 [rows, in_features]. A product of a number of 4
    bits with a scale of 16 bits is exact; one with a float32 scale is rounded once."""
    groups = torch.arange(linear.in_features) // linear.group_rows
    return (
        linear.weight.view(torch.uint8)[rows]
        .view(torch.float8_e4m3fn)
        .float()
        .mul_(linear.row_scales(rows)[:, groups])
    )
