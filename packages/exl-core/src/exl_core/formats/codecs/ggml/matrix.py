"""Run-time form of GGUF blocks, for the element formats that have one.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are passed on as stored. Q4_K and Q5_K have groups of 32 with scales
`d * s` and minimums `-(dmin * m)`. These are products of 11-bit and 6-bit numbers, which float32
represents exactly, so nothing is lost by multiplying them out. A 5-bit code times such a scale is
exact as well, and the sum has one rounding, the same as in the format's definition.

IQ4_NL and IQ4_XS have groups of 32 whose codes are indices into a table. The scales of IQ4_XS are
products of 11-bit and 6-bit numbers as well. MXFP4 has groups of 32 in the same order, whose scales
are exponents of one byte.

Q2_K, Q3_K and Q6_K have groups of 16. Op tables round groups up to 32 rows, which would make Q6_K
take 14 bits per weight and twice the work, against 16 bits as float16. These types are dequantized
instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from exl_core.formats.codecs.ggml.layout import GROUPS
from exl_core.ops.weights import (
    NO_EXPONENT,
    Formula,
    GroupedColumns,
    GroupedLayout,
    GroupRun,
    Packing,
)

GROUP_ROWS = 32
SUPERBLOCK_GROUPS = 8  # groups per block of Q4_K and Q5_K


class _Form(NamedTuple):
    formula: Formula
    packing: Packing
    has_float_scales: bool = False  # products of two numbers, as float32

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.formula == "mxfp4":
            return torch.uint8
        return torch.float32 if self.has_float_scales else torch.float16

    @property
    def scales(self) -> int:
        """Number of float16 values at the start of each block."""
        return 2 if self.formula == "minimums" else 1


_FORMS = {
    GGMLQuantizationType.Q4_0: _Form("middle", "q4_0"),
    GGMLQuantizationType.Q4_1: _Form("minimums", "q4_1"),
    GGMLQuantizationType.Q5_0: _Form("middle", "q5_0"),
    GGMLQuantizationType.Q5_1: _Form("minimums", "q5_1"),
    GGMLQuantizationType.Q8_0: _Form("middle", "q8_0"),
    GGMLQuantizationType.Q4_K: _Form("minimums", "bytes", has_float_scales=True),
    GGMLQuantizationType.Q5_K: _Form("minimums", "bytes", has_float_scales=True),
    GGMLQuantizationType.IQ4_NL: _Form("iq4_nl", "bytes"),
    GGMLQuantizationType.IQ4_XS: _Form("iq4_nl", "bytes", has_float_scales=True),
    GGMLQuantizationType.MXFP4: _Form("mxfp4", "bytes"),
}


def layout_of(
    kind: GGMLQuantizationType, out_features: int, in_features: int
) -> GroupedLayout | None:
    """Run-time layout of a matrix of type `kind`; None if the type is dequantized instead."""
    form = _FORMS.get(kind)
    if form is None:
        return None
    return GroupedLayout(
        out_features=out_features,
        in_features=in_features,
        runs=(GroupRun(GROUPS[kind].bits, in_features // GROUP_ROWS, GROUP_ROWS),),
        features=None,
        scale_dtype=form.scale_dtype,
        formula=form.formula,
    )


def bad_blocks(raw: Tensor, kind: GGMLQuantizationType) -> int:
    """Number of blocks in `raw`, uint8 [rows, bytes], that have a non-finite scale."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    if _FORMS[kind].formula == "mxfp4":
        return int((raw.view(-1, block_bytes)[:, 0] == NO_EXPONENT).sum())
    scales = raw.view(-1, block_bytes)[:, : 2 * _FORMS[kind].scales].contiguous()
    is_finite = scales.view(torch.float16).isfinite()
    return 0 if is_finite.all() else int((~is_finite).any(1).sum())


def columns_of(raw: Tensor, kind: GGMLQuantizationType) -> GroupedColumns:
    """Run-time form of the matrix columns that the file stores as rows `raw`, uint8 [columns,
    bytes]."""
    packing = _FORMS[kind].packing
    if packing != "bytes":
        return GroupedColumns(packing, raw)
    blocks = raw.view(raw.shape[0], -1, GGML_QUANT_SIZES[kind][1])  # [columns, blocks, bytes]
    if _FORMS[kind].formula in ("iq4_nl", "mxfp4"):
        return _table_columns(blocks, kind)
    factors = blocks[:, :, :4].contiguous().view(torch.float16).float()  # d, dmin
    scale_codes, minimum_codes = _unpack_6_bits(blocks[:, :, 4:16])
    scales = factors[:, :, :1] * scale_codes
    minimums = -(factors[:, :, 1:] * minimum_codes)
    codes = _unpack_codes(blocks, kind)
    return GroupedColumns(
        "bytes",
        codes.view(raw.shape[0], -1).T.contiguous(),
        scales=scales.view(raw.shape[0], -1).T.contiguous(),
        offsets=minimums.view(raw.shape[0], -1).T.contiguous(),
    )


def _table_columns(blocks: Tensor, kind: GGMLQuantizationType) -> GroupedColumns:
    """IQ4_NL, IQ4_XS and MXFP4, [columns, blocks, bytes]. A group has 16 bytes, whose low halves
    are the codes of rows 0 .. 15 and whose high halves are those of rows 16 .. 31."""
    columns = blocks.shape[0]
    if kind is GGMLQuantizationType.MXFP4:
        scales, first = blocks[:, :, :1], 1
    else:
        scales, first = blocks[:, :, :2].contiguous().view(torch.float16), 2
    if kind is GGMLQuantizationType.IQ4_XS:
        scales = scales.float() * _unpack_xs_scales(blocks[:, :, 2:4], blocks[:, :, 4:8])
        first = 8
    nibbles = blocks[:, :, first:].reshape(columns, -1, GROUP_ROWS // 2)
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)  # [columns, groups, 32]
    return GroupedColumns(
        "bytes",
        codes.view(columns, -1).T.contiguous(),
        scales=scales.reshape(columns, -1).T.contiguous(),
    )


def _unpack_xs_scales(high: Tensor, low: Tensor) -> Tensor:
    """The 8 scales of IQ4_XS, minus 32: low 4 bits from `low`, top 2 bits from `high`."""
    groups = torch.arange(SUPERBLOCK_GROUPS, device=high.device)
    low_bits = low[..., groups // 2] >> 4 * (groups % 2) & 15
    high_bits = high[..., groups // 4] >> 2 * (groups % 4) & 3
    return (low_bits | high_bits << 4).short() - 32


def _unpack_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks 8 scales and 8 minimums from 12 bytes: [..., 12] -> two of [..., 8].

    The first four of each are the low 6 bits of a byte. The other four have their low 4 bits in the
    last four bytes, and their top 2 bits in the top bits of the first eight bytes.
    """
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=-1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=-1)
    return scales, minimums


def _unpack_codes(blocks: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Codes, uint8 [columns, blocks, groups, 32]. Two groups share 32 bytes, the first in the low
    halves."""
    columns, count, _ = blocks.shape
    pairs = blocks[:, :, -128:].reshape(columns, count, 4, 1, GROUP_ROWS)
    codes = torch.cat([pairs & 15, pairs >> 4], dim=-2)  # [columns, blocks, 4, 2, 32]
    codes = codes.view(columns, count, SUPERBLOCK_GROUPS, GROUP_ROWS)
    if kind is GGMLQuantizationType.Q5_K:  # bit g of byte r is the fifth bit of group g's row r
        high = (
            blocks[:, :, None, 16:48]
            >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        )
        codes |= (high & 1) << 4
    return codes
