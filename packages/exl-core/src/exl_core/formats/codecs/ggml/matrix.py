"""Run-time form of GGUF blocks, for the element formats that have one.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are passed on as stored. Q4_K and Q5_K have groups of 32 with scales
`d * s` and minimums `-(dmin * m)`. These are products of 11-bit and 6-bit numbers, which float32
represents exactly, so nothing is lost by multiplying them out. A 5-bit code times such a scale is
exact as well, and the sum has one rounding, the same as in the format's definition.

IQ4_NL and IQ4_XS have groups of 32 whose codes are indices into a table. The scales of IQ4_XS are
products of 11-bit and 6-bit numbers as well. MXFP4 has groups of 32 in the same order, whose scales
are exponents of one byte.

Q2_K, Q3_K and Q6_K have groups of 16. Their scales are products of an 11-bit number and one of at
most 8 bits, and exact as well. A table that pads such groups should not get these types: Q6_K would
take 14 bits per weight and twice the work, against 16 bits as float16 (`Checkpoint`).
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
    ScaleParts,
)

GROUP_ROWS = 32  # of the types that are not in _SMALL_GROUPS
SUPERBLOCK_ROWS = 256  # of the types in _SMALL_GROUPS
SUPERBLOCK_GROUPS = 8  # groups per block of Q4_K, Q5_K and IQ4_XS


class _Form(NamedTuple):
    formula: Formula
    packing: Packing
    has_float_scales: bool = False  # products of two numbers, as float32
    scales_at: int = 0  # first byte of a block's float16 values

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.formula == "mxfp4":
            return torch.uint8
        return torch.float32 if self.has_float_scales else torch.float16

    @property
    def scales(self) -> int:
        """Number of float16 values of each block."""
        return 2 if self.formula == "minimums" else 1


_FORMS = {
    GGMLQuantizationType.Q4_0: _Form("middle", "q4_0"),
    GGMLQuantizationType.Q4_1: _Form("minimums", "q4_1"),
    GGMLQuantizationType.Q5_0: _Form("middle", "q5_0"),
    GGMLQuantizationType.Q5_1: _Form("minimums", "q5_1"),
    GGMLQuantizationType.Q8_0: _Form("middle", "q8_0"),
    GGMLQuantizationType.Q4_K: _Form("minimums", "bytes", has_float_scales=True),
    GGMLQuantizationType.Q5_K: _Form("minimums", "bytes", has_float_scales=True),
    GGMLQuantizationType.Q2_K: _Form("minimums", "bytes", has_float_scales=True, scales_at=80),
    GGMLQuantizationType.Q3_K: _Form("middle", "bytes", has_float_scales=True, scales_at=108),
    GGMLQuantizationType.Q6_K: _Form("middle", "bytes", has_float_scales=True, scales_at=208),
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
    bits, rows = GROUPS[kind]
    return GroupedLayout(
        out_features=out_features,
        in_features=in_features,
        runs=(GroupRun(bits, in_features // rows, rows),),
        features=None,
        scale_dtype=form.scale_dtype,
        formula=form.formula,
        factor_rows=SUPERBLOCK_ROWS if rows < GROUP_ROWS else 0,
    )


def bad_blocks(raw: Tensor, kind: GGMLQuantizationType) -> int:
    """Number of blocks in `raw`, uint8 [rows, bytes], that have a non-finite scale."""
    block_bytes, form = GGML_QUANT_SIZES[kind][1], _FORMS[kind]
    if form.formula == "mxfp4":
        return int((raw.view(-1, block_bytes)[:, 0] == NO_EXPONENT).sum())
    first, last = form.scales_at, form.scales_at + 2 * form.scales
    scales = raw.view(-1, block_bytes)[:, first:last].contiguous()
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
    unpack = _SMALL_GROUPS.get(kind)
    parts = _unpack_k(blocks, kind) if unpack is None else unpack(blocks)

    def stored(part: Tensor) -> Tensor:
        return part.flatten(1).T.contiguous()

    return GroupedColumns(
        "bytes",
        stored(parts.codes),
        scales=stored(parts.scales),
        offsets=None if parts.minimums is None else stored(parts.minimums),
        parts=None
        if parts.multipliers is None
        else _scale_parts(blocks, kind, stored(parts.multipliers)),
    )


def _scale_parts(blocks: Tensor, kind: GGMLQuantizationType, multipliers: Tensor) -> ScaleParts:
    first = _FORMS[kind].scales_at
    numbers = [
        blocks[:, :, at : at + 2].contiguous().view(torch.float16).flatten(1).T.contiguous()
        for at in range(first, first + 2 * _FORMS[kind].scales, 2)
    ]
    return ScaleParts(numbers[0], multipliers, numbers[1] if len(numbers) > 1 else None)


class _Parts(NamedTuple):
    """Codes, uint8 [columns, blocks, 256]; scales, minimums, float32 [columns, blocks, groups];
    multipliers of `ScaleParts`, uint8 in the shape of the scales."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    multipliers: Tensor | None = None


def _unpack_k(blocks: Tensor, kind: GGMLQuantizationType) -> _Parts:
    """Q4_K and Q5_K."""
    factors = _floats(blocks[:, :, :4])  # d, dmin
    scales, minimums = _unpack_6_bits(blocks[:, :, 4:16])
    codes = _spread(blocks[:, :, -128:], 32, 4)
    if kind is GGMLQuantizationType.Q5_K:
        codes |= _spread(blocks[:, :, 16:48], 32, 1) << 4
    return _Parts(codes, factors[:, :, :1] * scales, -(factors[:, :, 1:] * minimums))


def _unpack_q2_k(blocks: Tensor) -> _Parts:
    """A scale (low half) and a minimum of 4 bits per group, codes, d, dmin."""
    factors, packed = _floats(blocks[:, :, 80:84]), blocks[:, :, :16]
    minimums = -(factors[:, :, 1:] * (packed >> 4))
    codes = _spread(blocks[:, :, 16:80], 32, 2)
    return _Parts(codes, factors[:, :, :1] * (packed & 15), minimums, packed)


def _unpack_q3_k(blocks: Tensor) -> _Parts:
    """High bits of the codes, low bits, scales of 6 bits (low 4, then high 2) plus 32, d."""
    codes = _spread(blocks[:, :, 32:96], 32, 2) | _spread(blocks[:, :, :32], 32, 1) << 2
    low, high = _spread(blocks[:, :, 96:104], 8, 4), _spread(blocks[:, :, 104:108], 4, 2)
    scales = (low | high << 4).short() - 32
    multipliers = scales.to(torch.int8).view(torch.uint8)
    return _Parts(codes, _floats(blocks[:, :, 108:110]) * scales, None, multipliers)


def _unpack_q6_k(blocks: Tensor) -> _Parts:
    """Low 4 bits of the codes, high 2 bits, scales of 8 bits with a sign, d."""
    codes = _spread(blocks[:, :, :128], 64, 4) | _spread(blocks[:, :, 128:192], 32, 2) << 4
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    multipliers = scales.view(torch.uint8)
    return _Parts(codes, _floats(blocks[:, :, 208:210]) * scales, None, multipliers)


_SMALL_GROUPS = {
    GGMLQuantizationType.Q2_K: _unpack_q2_k,
    GGMLQuantizationType.Q3_K: _unpack_q3_k,
    GGMLQuantizationType.Q6_K: _unpack_q6_k,
}


def _floats(raw: Tensor) -> Tensor:
    """Bytes of float16 values, as float32."""
    return raw.contiguous().view(torch.float16).float()


def _spread(packed: Tensor, run: int, bits: int) -> Tensor:
    """Unpacks numbers of `bits` bits: [..., bytes] -> [..., 8 / bits * bytes].

    Each run of `run` bytes holds its first `run` numbers in the lowest bits of its bytes, the next
    ones in the bits above, and so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    parts = runs >> shifts[:, None]  # [..., runs, 8 / bits, run]
    numbers: Tensor = parts & 2**bits - 1
    return numbers.flatten(-3)


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
    codes = _spread(blocks[:, :, first:], GROUP_ROWS // 2, 4)
    return GroupedColumns(
        "bytes",
        codes.reshape(columns, -1).T.contiguous(),
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
