"""Caches of keys and values in every format, and comparison of their stored bits."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.cache_rows import row_size

F32, F16, F8 = torch.float32, torch.float16, torch.float8_e4m3fn
CODES8, CODES4 = torch.int8, torch.uint8
FORMATS = {
    "f32": (F32, F32),
    "f16": (F16, F16),
    "fp8": (F8, F8),
    "q8": (CODES8, CODES8),
    "q6": (CODES8, CODES4),
    "q4": (CODES4, CODES4),
}
"""Types of the key cache and of the value cache, by format."""


def random_caches(
    rng: torch.Generator, name: str, d: int, *, pages: int, kv_heads: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Key cache and value cache of random bytes, so that a write to a wrong place shows."""

    def one(dtype: torch.dtype) -> Tensor:
        size = row_size(dtype, d) * dtype.itemsize
        shape = (pages, kv_heads, page_size, size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=rng).view(dtype)

    key_type, value_type = FORMATS[name]
    return one(key_type), one(value_type)


def assert_same_bits(got: Tensor, expected: Tensor, d: int) -> None:
    """Same bytes, except that NaN scales and NaN values of float16 and float32 may be any NaN."""
    got = got.cpu()
    same = got.view(torch.uint8) == expected.view(torch.uint8)
    if same.all():
        return
    if got.dtype in {CODES8, CODES4}:
        codes = d if got.dtype == CODES8 else d // 2
        scales = [x[..., codes:].contiguous().view(F16) for x in (got, expected)]
        assert same[..., :codes].all()
    else:
        scales = [got, expected]
    assert torch.equal(scales[0].isnan(), scales[1].isnan())
    assert torch.equal(scales[0].float().nan_to_num(), scales[1].float().nan_to_num())
