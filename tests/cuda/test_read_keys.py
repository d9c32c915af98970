"""Cache rows of a sequence as float16, for every format and for shared rows of latent attention."""

from __future__ import annotations

import pytest
import torch

from exl_core.ops.attention import CacheLayer
from exl_core.ops.backends.cuda.attention import Attention
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.cache_rows import decode_rows, encode_rows
from support.kv_caches import FORMATS

pytestmark = pytest.mark.cuda

PAGE_SIZE, PAGES = 32, 9


@pytest.mark.parametrize(("kv_heads", "d"), [(1, 576), (1, 320), (3, 128), (2, 96)])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 32, 139])
def test_rows_are_decoded_in_the_order_of_positions(
    name: str, kv_heads: int, d: int, count: int
) -> None:
    device = torch.device("cuda")
    rng = torch.Generator(device).manual_seed(count + d)
    values = torch.randn(PAGES, kv_heads, PAGE_SIZE, d, generator=rng, device=device)
    keys = encode_rows(values, FORMATS[name][0])
    pages = torch.randperm(PAGES, generator=rng, device=device)

    got = Attention(Gpu(device)).read_keys(CacheLayer(keys, keys), pages.int(), count)

    at = torch.arange(count, device=device)
    exact = decode_rows(keys)[pages[at // PAGE_SIZE], :, at % PAGE_SIZE]
    assert got.dtype is torch.float16
    # One rounding to float16, and float32 sums of up to 32 codes.
    bound = 2**-11 * exact.abs() + 2**-19 * exact.abs().amax(-1, keepdim=True) + 2**-25
    assert bool(((got.double() - exact).abs() <= bound).all())
