"""Writes of keys and values to their cache slots."""

from __future__ import annotations

import pytest
import torch
from kernel_support import normal, strided_rows

from exl_core.ops.attention import CacheLayer
from exl_core.ops.table import OpTable
from support.kv_caches import FORMATS, assert_same_bits, random_caches

GPU_HEADS = [(name, d) for name in FORMATS for d in (64, 96, 128, 256)] + [
    (name, d) for name in ("f32", "f16", "fp8") for d in (8, 72, 80)
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 37, 130])
@pytest.mark.parametrize(("heads", "d", "page_size"), [(3, 64, 256), (1, 20, 16), (2, 7, 5)])
def test_rows_go_to_their_slots_and_nowhere_else(
    *,
    cpu_table: OpTable,
    rng: torch.Generator,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    d: int,
    page_size: int,
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

    cpu_table.write_kv(key, value, CacheLayer(key_cache, value_cache), slots)

    assert torch.equal(key_cache, expected_keys)
    assert torch.equal(value_cache, expected_values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 130, 900])
@pytest.mark.parametrize(("name", "d"), GPU_HEADS)
def test_the_gpu_stores_the_bits_of_the_reference(
    *,
    gpu_table: OpTable,
    reference: OpTable,
    rng: torch.Generator,
    name: str,
    d: int,
    rows: int,
    dtype: torch.dtype,
) -> None:
    kv_heads, page_size, pages = 3, 16, -(-rows // 16) + 3
    expected = random_caches(rng, name, d, pages=pages, kv_heads=kv_heads, page_size=page_size)
    stored = [cache.clone() for cache in expected]
    spread = torch.randn(rows, kv_heads, 1, generator=rng).mul(4).exp2()
    both = torch.randn(rows, 2, kv_heads, d, generator=rng) * spread[:, None]
    both[0, :, 0] = 0.0
    both = both.to(dtype)
    slots = torch.randperm(pages * page_size, generator=rng)[:rows]

    reference.write_kv(both[:, 0].float(), both[:, 1].float(), CacheLayer(*expected), slots)
    gpu_table.write_kv(both[:, 0], both[:, 1], CacheLayer(*stored), slots)

    for got, right in zip(stored, expected, strict=True):
        assert_same_bits(got, right, d)


@pytest.mark.parametrize("name", FORMATS)
def test_the_gpu_stores_nan_infinity_and_large_values_as_the_reference_does(
    gpu_table: OpTable, reference: OpTable, rng: torch.Generator, name: str
) -> None:
    d, rows = 96, 8
    expected = random_caches(rng, name, d, pages=1, kv_heads=1, page_size=16)
    stored = [cache.clone() for cache in expected]
    key = torch.randn(rows, 1, d, generator=rng)
    key[1, 0, 5], key[2, 0, 70], key[3, 0, 95] = torch.inf, -torch.inf, torch.nan
    key[4] *= 500.0
    key[5, 0, 3], key[6] = 65504.0, 6e-8
    key[7, 0, 40] = 1e5
    slots = torch.arange(rows)

    reference.write_kv(key, key, CacheLayer(*expected), slots)
    gpu_table.write_kv(key, key, CacheLayer(*stored), slots)

    for got, right in zip(stored, expected, strict=True):
        assert_same_bits(got, right, d)


def test_rounding_to_fp16_is_ieee(cpu_table: OpTable, rng: torch.Generator) -> None:
    """Rounds as torch does, bit by bit: nearest even, subnormals, overflow to infinity, NaN."""
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

    cpu_table.write_kv(key, key, CacheLayer(*caches), torch.arange(rows))

    expected = key.half().flatten()
    for cache in caches:
        got = cache.flatten()
        assert torch.equal(got.isnan(), expected.isnan())
        bits = [x[~expected.isnan()].view(torch.int16) for x in (got, expected)]
        assert torch.equal(*bits)
