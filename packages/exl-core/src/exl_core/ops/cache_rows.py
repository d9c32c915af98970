"""Rows of the key-value cache: encoding, decoding and checks of the reference table.

Codes are bit-exact (`csrc/include/exl/formats/kv.h`): torch's float16 arithmetic rounds once after
every step, as the format requires. Decoding is exact in float64, because a decoder's roundings are
not part of the value that codes stand for. Decoding with `torch.float16` rounds after every step of
the format's formula.
"""

from __future__ import annotations

import torch
from torch import Tensor, dtype

from exl_core.ops.attention import CacheLayer

CODE_BITS = {torch.int8: 8, torch.uint8: 4}
PLAIN_TYPES = (torch.float32, torch.float16, torch.float8_e4m3fn)
UNIT, GROUP = 64, 32


def row_size(cache_type: dtype, head_dim: int) -> int:
    """Number of cache elements in one row."""
    bits = CODE_BITS.get(cache_type)
    return head_dim if bits is None else head_dim * bits // 8 + head_dim // GROUP * 2


def head_dim_of(cache: Tensor) -> int:
    """Head size that the rows of a cache hold; 0 if no head has rows of that length."""
    size = cache.shape[-1]
    if cache.dtype not in CODE_BITS:
        return size
    group = row_size(cache.dtype, GROUP)
    return size // group * GROUP if size % group == 0 else 0


def queries_of(qkv: Tensor, cache: CacheLayer) -> Tensor:
    """View of the queries in a fused projection [rows, (q_heads + 2 kv_heads) * d]; of keys alone
    with a shared cache."""
    return qkv[:, : qkv.shape[1] - cache.heads_per_row * head_dim_of(cache.keys)]


def encode_rows(x: Tensor, cache_type: dtype) -> Tensor:
    """Encodes x [..., d] into cache rows [..., row]."""
    if cache_type == torch.float8_e4m3fn:
        none = torch.full_like(x, torch.nan).copysign(x)
        return torch.where(x.isfinite(), x.clamp(-448, 448), none).to(cache_type)
    if cache_type not in CODE_BITS:
        return x.to(cache_type)
    return _encode_codes(x.half(), CODE_BITS[cache_type]).view(cache_type)


def decode_rows(rows: Tensor, number: dtype = torch.float64) -> Tensor:
    """Decodes cache rows [..., row] -> [..., d]. Codes are decoded in `number` arithmetic."""
    if rows.dtype not in CODE_BITS:
        return rows.to(number)
    bits, d = CODE_BITS[rows.dtype], head_dim_of(rows)
    rows = rows.contiguous().view(torch.uint8)
    codes, scales = rows[..., : d * bits // 8], rows[..., d * bits // 8 :]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    scale = scales.contiguous().view(torch.float16).to(number).repeat_interleave(GROUP, dim=-1)
    y = (codes.to(number) - 2 ** (bits - 1)) * scale  # [..., d]
    return torch.cat([rotate(unit) * (2 / unit.shape[-1]) for unit in _units(y)], dim=-1)


def rotate(x: Tensor) -> Tensor:
    """Unnormalized Walsh-Hadamard transforms of even and of odd elements of a unit [..., n]."""
    stride = 2
    while stride < x.shape[-1]:
        pairs = x.reshape(*x.shape[:-1], -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return x


def _units(x: Tensor) -> list[Tensor]:
    whole = x.shape[-1] // UNIT * UNIT
    units = [x[..., start : start + UNIT] for start in range(0, whole, UNIT)]
    return units if whole == x.shape[-1] else [*units, x[..., whole:]]


def _encode_codes(x: Tensor, bits: int) -> Tensor:
    """float16 [..., d] -> bytes [..., row]."""
    half_range = 2 ** (bits - 1)
    y = torch.cat([rotate(unit) for unit in _units(x)], dim=-1)
    y = y.view(*y.shape[:-1], -1, GROUP)
    largest = y.abs().amax(-1, keepdim=True)  # float16 [..., d / 32, 1]; NaN if an element is
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    ratio = y / largest
    code = (ratio.float() * half_range + half_range).half().round()  # the product is exact
    codes = code.nan_to_num(nan=0.0).clamp(0, 2 * half_range - 1).to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    scales = (largest / half_range).squeeze(-1).contiguous().view(torch.uint8)
    return torch.cat([codes, scales], dim=-1)
