"""Keys and values into their cache slots."""

from __future__ import annotations

import pytest
import torch
from kernel_support import normal, strided_rows

from exl_core.ops.attention import CacheLayer
from exl_core.ops.table import OpTable


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 37, 130])
@pytest.mark.parametrize(("heads", "d", "page_size"), [(3, 64, 256), (1, 20, 16), (2, 7, 5)])
def test_rows_go_to_their_slots_and_nowhere_else(
    *, table: OpTable, rng, dtype, rows, heads, d, page_size
) -> None:
    pages = -(-2 * rows // page_size) + 1
    key, value = strided_rows(rng, rows, heads, d), strided_rows(rng, rows, heads, d)
    slots = torch.randperm(pages * page_size, generator=rng)[:rows]
    key_cache = normal(rng, pages, heads, page_size, d).to(dtype)
    value_cache = normal(rng, pages, heads, page_size, d).to(dtype)
    expected_keys, expected_values = key_cache.clone(), value_cache.clone()
    for row, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        expected_keys[page, :, offset] = key[row].to(dtype)
        expected_values[page, :, offset] = value[row].to(dtype)

    table.write_kv(key, value, CacheLayer(key_cache, value_cache), slots)

    assert torch.equal(key_cache, expected_keys)
    assert torch.equal(value_cache, expected_values)


def test_rounding_to_fp16_is_ieee(table: OpTable, rng) -> None:
    """Nearest even, subnormals, overflow to infinity, NaN: bit by bit what torch does."""
    halves = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    midpoints = (halves[1:] + halves[:-1]) / 2
    special = torch.tensor([65504.0, 65519.9, 65520.0, 1e30, torch.inf, 2.0**-25, 2.0**-26, 0.0])
    values = torch.cat(
        [
            halves,
            midpoints,
            torch.nextafter(midpoints, torch.tensor(torch.inf)),
            torch.nextafter(midpoints, torch.tensor(-torch.inf)),
            special,
            torch.randn(1000, generator=rng) * 1e-6,
        ]
    )
    values = torch.cat([values, -values, torch.full((3,), torch.nan)])
    rows = -(-len(values) // 16)
    key = torch.zeros(rows * 16)
    key[: len(values)] = values
    key = key.view(rows, 1, 16)
    caches = [torch.zeros(1, 1, rows, 16, dtype=torch.float16) for _ in range(2)]

    table.write_kv(key, key, CacheLayer(*caches), torch.arange(rows))

    expected = key.half().flatten()
    for cache in caches:
        got = cache.flatten()
        assert torch.equal(got.isnan(), expected.isnan())
        bits = [x[~expected.isnan()].view(torch.int16) for x in (got, expected)]
        assert torch.equal(*bits)
