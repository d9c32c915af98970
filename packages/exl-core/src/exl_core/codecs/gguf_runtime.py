"""GGUF blocks to compute with: which element formats have a run-time form, and what it is.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are handed on as the file has them. Q4_K and Q5_K have groups of 32
with scales `d * s` and minimums `-(dmin * m)`: products of 11 and 6 bits, which float32 holds
exactly, so nothing is lost by multiplying them out. A code of 5 bits times such a scale is exact as
well, and the sum has the one rounding that the format itself has.

Q2_K, Q3_K and Q6_K have groups of 16. Tables round groups up to 32 rows, which would make Q6_K
14 bits a weight and twice the work, against 16 bits as float16: they are dequantized instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from exl_core.codecs.gguf_blocks import GROUPS
from exl_core.ops.quantized import GroupRun, Offset, Packing, QuantColumns, QuantLayout

GROUP_ROWS = 32
SUPERBLOCK_GROUPS = 8  # in the blocks of Q4_K and Q5_K


class _Form(NamedTuple):
    offset: Offset
    packing: Packing

    @property
    def scales(self) -> int:
        """float16 numbers at the start of each block."""
        return 2 if self.offset == "minimums" else 1


_FORMS = {
    GGMLQuantizationType.Q4_0: _Form("middle", "q4_0"),
    GGMLQuantizationType.Q4_1: _Form("minimums", "q4_1"),
    GGMLQuantizationType.Q5_0: _Form("middle", "q5_0"),
    GGMLQuantizationType.Q5_1: _Form("minimums", "q5_1"),
    GGMLQuantizationType.Q8_0: _Form("middle", "q8_0"),
    GGMLQuantizationType.Q4_K: _Form("minimums", "bytes"),
    GGMLQuantizationType.Q5_K: _Form("minimums", "bytes"),
}


def layout_of(
    kind: GGMLQuantizationType, out_features: int, in_features: int
) -> QuantLayout | None:
    """How a matrix of that kind is computed with; None if it is not, but dequantized."""
    form = _FORMS.get(kind)
    if form is None:
        return None
    return QuantLayout(
        out_features=out_features,
        in_features=in_features,
        runs=(GroupRun(GROUPS[kind].bits, in_features // GROUP_ROWS, GROUP_ROWS),),
        features=None,
        scale_dtype=torch.float32 if form.packing == "bytes" else torch.float16,
        offset=form.offset,
    )


def bad_blocks(raw: Tensor, kind: GGMLQuantizationType) -> int:
    """How many blocks of rows `raw`, uint8 [rows, bytes], have a scale that is not finite."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    scales = raw.view(-1, block_bytes)[:, : 2 * _FORMS[kind].scales].contiguous()
    is_finite = scales.view(torch.float16).isfinite()
    return 0 if is_finite.all() else int((~is_finite).any(1).sum())


def columns_of(raw: Tensor, kind: GGMLQuantizationType) -> QuantColumns:
    """The columns whose rows in the file are `raw`, uint8 [columns, bytes]."""
    packing = _FORMS[kind].packing
    if packing != "bytes":
        return QuantColumns(packing, raw)
    blocks = raw.view(raw.shape[0], -1, GGML_QUANT_SIZES[kind][1])  # [columns, blocks, bytes]
    factors = blocks[:, :, :4].contiguous().view(torch.float16).float()  # d, dmin
    scale_codes, minimum_codes = _unpack_6_bits(blocks[:, :, 4:16])
    scales = factors[:, :, :1] * scale_codes
    minimums = -(factors[:, :, 1:] * minimum_codes)
    codes = _unpack_codes(blocks, kind)
    return QuantColumns(
        "bytes",
        codes.view(raw.shape[0], -1).T.contiguous(),
        scales=scales.view(raw.shape[0], -1).T.contiguous(),
        offsets=minimums.view(raw.shape[0], -1).T.contiguous(),
    )


def _unpack_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums, 8 each, of 12 bytes: [..., 12] -> two of [..., 8].

    The first four of each have a byte of their own; the others have 4 bits in the last bytes, and
    their top 2 bits above those of the first.
    """
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=-1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=-1)
    return scales, minimums


def _unpack_codes(blocks: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """uint8 [columns, blocks, groups, 32]: two groups share 32 bytes, the first one low."""
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
