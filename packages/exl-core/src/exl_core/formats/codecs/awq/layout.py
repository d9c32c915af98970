"""AWQ: meaning of the tensors of one quantized linear, bit by bit, and their exact values.

    qweight  int32 [K, N/8]   codes of 4 bits, 8 columns per word
    qzeros   int32 [G, N/8]   zero points, packed likewise
    scales   fp16  [G, N]     (bfloat16 and float32 are read too, without rounding)

    weight[k, n] = scales[g, n] * (code - zero),  g = k // group_size

Field i of a word, bits 4 i and up, belongs to column FIELD_COLUMN[i] of its 8 columns. This is the
packing that AutoAWQ calls "gemm". Knows neither files nor models; the caller handles the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.arch.fields import Fields
from exl_core.errors import UnsupportedModelError, WeightShapeError
from exl_core.formats.codecs import bits as bitstream
from exl_core.formats.codecs.runtime import check_scales

PARTS = ("qweight", "qzeros", "scales")
BITS = 4
PER_WORD = 8
FIELD_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
ONE_GROUP = -1  # group size that stands for the whole column
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class AwqSettings:
    """Settings of a checkpoint that its tensors do not contain."""

    group_size: int  # ONE_GROUP for one group

    def group_rows(self, in_features: int) -> int:
        return in_features if self.group_size == ONE_GROUP else self.group_size


def parse_settings(config: Mapping[str, object], where: object) -> AwqSettings:
    """Settings from `quantization_config` in `config.json`."""
    fields = Fields(config, where)

    def refuse(what: str, expected: str, got: object) -> UnsupportedModelError:
        return UnsupportedModelError(
            what,
            where=where,
            expected=expected,
            got=got,
            next_step="Use another quantization of the model, or the unquantized one.",
        )

    bits = fields.integer("bits")
    if bits != BITS:
        raise refuse("AWQ of this width is not supported", f"{BITS} bits", f"{bits} bits")
    version = fields.text("version", "gemm").lower()
    if version != "gemm":
        raise refuse("AWQ in this packing is not supported", "'version' gemm", version)
    is_one_group = config.get("group_size") == ONE_GROUP
    return AwqSettings(ONE_GROUP if is_one_group else fields.integer("group_size"))


@dataclass(frozen=True, slots=True, eq=False)
class AwqLinear:
    """Tensors of one layer, as validated by `check`."""

    group_rows: int
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    @property
    def in_features(self) -> int:
        return self.qweight.shape[0]

    @property
    def out_features(self) -> int:
        return self.qweight.shape[1] * PER_WORD


def check(parts: Mapping[str, Tensor], settings: AwqSettings, where: object) -> AwqLinear:
    """Validates the tensors of a layer. Errors name the tensor at fault."""
    qweight = bitstream.take(parts, "qweight", 2, (torch.int32,), where)
    qzeros = bitstream.take(parts, "qzeros", 2, (torch.int32,), where)
    scales = bitstream.take(parts, "scales", 2, FLOATS, where)
    rows, words = qweight.shape
    group_rows = settings.group_rows(rows)
    if rows % group_rows:
        raise WeightShapeError(
            "tensor 'qweight' has rows that do not fill whole groups",
            where=where,
            expected=f"a multiple of {group_rows}",
            got=rows,
        )
    groups = rows // group_rows
    reason = f"'qweight' has {rows} rows in groups of {group_rows}, {PER_WORD * words} columns"
    bitstream.require_shape(qzeros, "qzeros", (groups, words), reason, where)
    bitstream.require_shape(scales, "scales", (groups, PER_WORD * words), reason, where)
    check_scales(scales, "scales", where)
    return AwqLinear(group_rows, qweight, qzeros, scales)


def unpack(words: Tensor) -> Tensor:
    """Fields of 4 bits in the order of their columns: int32 [rows, n / 8] -> uint8 [rows, n]."""
    fields = torch.empty(*words.shape, PER_WORD, dtype=torch.uint8, device=words.device)
    for field, column in enumerate(FIELD_COLUMN):
        fields[..., column] = (words >> BITS * field) & 15
    return fields.flatten(1)


def dequantize(linear: AwqLinear) -> Tensor:
    """Exact weights, float32 [in_features, out_features]. A product with a float16 or bfloat16
    scale has at most 16 significant bits, so it is not rounded."""
    groups = torch.arange(linear.in_features) // linear.group_rows
    weight = unpack(linear.qweight).float()
    zeros, scales = unpack(linear.qzeros), linear.scales.float()
    return weight.sub_(zeros[groups]).mul_(scales[groups])
