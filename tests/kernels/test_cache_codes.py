"""Cache rows of codes and of fp8: stored bits, rounding, NaN, and operands that are refused."""

from __future__ import annotations

import pytest
import torch
from kernel_support import assert_within, normal, strided_rows
from paged_support import scaled_codes, transform
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.cache_rows import decode_rows, encode_rows, row_size
from exl_core.ops.open import available_isas, get_table
from exl_core.ops.table import OpTable
from support.kv_caches import CODES4, CODES8, FORMATS
from support.kv_caches import F8 as FP8

# These sets share their cache code with avx512.
SHARED = {"avx512vnni", "amx"}

CODED = {name: FORMATS[name] for name in ("fp8", "q8", "q6", "q4")}

HALF_UNIT = 2.0**-11  # the error of one float16 rounding

VECTOR = torch.tensor([((37 * j) % 101 - 50) / 16 for j in range(64)])
VECTOR_ROWS = {
    CODES4: "79979B0EA4868A8646860A868A868286978A0E82868A868286FA86F28682868A" + "50425042",
    CODES8: "92696989B292E00044A46080A080608067476080A0006080A0806080208060806E8EA080E00020806080A0"
    "80608020806080A0FF608020FF608020806080A080" + "50325032",
}
VECTOR_DECODED = {
    CODES4: (0xC250, 0xBBE4, 0x3D86, 0xC0BC),
    CODES8: (0xC23E, 0xBA91, 0x3E04, 0xC0F8),
}


@pytest.fixture(
    scope="module", params=["reference", *(isa for isa in available_isas() if isa not in SHARED)]
)
def table(request: pytest.FixtureRequest) -> OpTable:
    is_reference = request.param == "reference"
    name, isa = ("reference", None) if is_reference else ("cpu", request.param)
    return get_table(name, isa=isa, threads=2)


def written(
    table: OpTable, key: Tensor, value: Tensor, kinds: tuple[torch.dtype, torch.dtype]
) -> list[Tensor]:
    """Rows of both caches as bytes, after a write of key and value [rows, heads, d]."""
    rows, heads, d = key.shape
    caches = [
        torch.zeros(-(-rows // 16), heads, 16, row_size(kind, d), dtype=kind) for kind in kinds
    ]
    table.write_kv(key, value, CacheLayer(*caches), torch.arange(rows))
    return [cache.view(torch.uint8).transpose(1, 2).flatten(0, 1)[:rows] for cache in caches]


@pytest.mark.parametrize("kind", [CODES8, CODES4], ids=str)
def test_the_published_row_is_stored_bit_for_bit(table: OpTable, kind: torch.dtype) -> None:
    row = VECTOR.view(1, 1, 64)
    for cache in written(table, row, row, (kind, kind)):
        assert bytes(cache.flatten().tolist()).hex().upper() == VECTOR_ROWS[kind]

    stored = encode_rows(row, kind)
    decoded = decode_rows(stored, torch.float16).flatten()[:4].view(torch.int16)
    assert tuple(int(bits) & 0xFFFF for bits in decoded) == VECTOR_DECODED[kind]


@pytest.mark.parametrize("kind", [CODES8, CODES4], ids=str)
@pytest.mark.parametrize("d", [32, 64, 96, 160])
def test_decoding_is_the_matrix_of_the_format(
    rng: torch.Generator, kind: torch.dtype, d: int
) -> None:
    rows = encode_rows(normal(rng, 50, d), kind)
    exact = scaled_codes(rows, d) @ transform(d)
    assert_within(decode_rows(rows), exact, 1e-12)
    # A decoder rounds the product, five stages and the result; at most 32 terms of size |y|.
    spread = scaled_codes(rows, d).abs() @ transform(d).abs()
    assert_within(decode_rows(rows, torch.float16), exact, 8 * HALF_UNIT * spread)


@pytest.mark.parametrize(("kind", "levels"), [(CODES8, 256), (CODES4, 16)])
@pytest.mark.parametrize("d", [32, 64, 96, 256])
def test_rounding_is_off_by_a_step_at_most(
    table: OpTable, rng: torch.Generator, kind: torch.dtype, levels: int, d: int
) -> None:
    x = normal(rng, 40, 2, d)
    stored = written(table, x, x, (kind, kind))[0].contiguous().view(kind)
    y = x.half().double() @ torch.linalg.inv(transform(d))
    top = y.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=-1)
    # Half a step, or a whole one at +A, which has no code. In float16 the ratio, the code and the
    # scale are off by a unit of A each, and five sums by a unit of their terms.
    sums = x.half().double().abs() @ torch.linalg.inv(transform(d)).abs()
    bound = 2 / levels * top + HALF_UNIT * (4 * top + 6 * sums)
    assert_within(scaled_codes(stored, d), y, bound)


@pytest.mark.parametrize("kinds", list(CODED.values()), ids=list(CODED))
@pytest.mark.parametrize("d", [32, 64, 96, 128, 256, 320])
def test_every_backend_stores_the_same_bits(
    kernels: OpTable, rng: torch.Generator, kinds: tuple[torch.dtype, torch.dtype], d: int
) -> None:
    """Rows of any magnitude. A row with NaN or infinity has NaN scales."""
    key, value = (strided_rows(rng, 41, 3, d) for _ in range(2))
    for x in (key, value):
        x.mul_(torch.exp(3 * normal(rng, 41, 3, 1)))
        x[3] = 0
        x[4, 0, d // 2] = torch.inf
        x[5, 0, 3] = torch.nan
        x[6] *= 1e-7  # subnormal
        x[7] = 3e4  # sums overflow
        x[8] = x[8, 0, 0]
        x[9] = torch.randint(-3, 4, (3, d), generator=rng) / 2  # many ties
    for got, x, kind in zip(written(kernels, key, value, kinds), (key, value), kinds, strict=True):
        assert torch.equal(got, encode_rows(x, kind).view(torch.uint8))


@pytest.mark.parametrize("kind", [CODES8, CODES4], ids=str)
def test_zeros_stay_zero_and_nan_stays_nan(table: OpTable, kind: torch.dtype) -> None:
    x = torch.zeros(3, 1, 96)
    x[1, 0, 5] = torch.nan
    x[2, 0, 95] = torch.inf
    rows = written(table, x, x, (kind, kind))[0].contiguous().view(kind)
    decoded = decode_rows(rows)[:, 0]
    assert not rows[0].any()
    assert not decoded[0].any()
    assert decoded[1, 1:64:2].isnan().all()
    assert decoded[2, 64:].isnan().any()


@pytest.mark.parametrize("d", [7, 16, 20, 80])
def test_fp8_is_the_nearest_value_of_e4m3(table: OpTable, d: int) -> None:
    """All float16 values and their neighbors in float32. Ties go to even, large values to 448."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    around = torch.cat([halves, *(halves.nextafter(torch.tensor(to)) for to in (-1e38, 1e38))])
    x = around[: len(around) // d * d].view(-1, 1, d)
    is_number = x.isfinite().view(-1, d)
    values = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 to 448, ascending
    low = torch.searchsorted(values, x.abs().view(-1, d).clamp(max=448), right=True) - 1
    high = (low + 1).clamp(max=126)
    below, above = x.abs().view(-1, d) - values[low], values[high] - x.abs().view(-1, d)
    is_up = (above < below) | ((above == below) & (low % 2 == 1))
    nearest = torch.where(is_up, high, low) | torch.signbit(x).view(-1, d) * 128

    for cache in written(table, x, x, (FP8, FP8)):
        got = cache.view(-1, d)
        assert torch.equal(got[is_number].long(), nearest[is_number])
        assert got[~is_number].view(FP8).float().isnan().all()


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(
    ("d", "key_cache", "value_cache", "names"),
    [
        (64, zeros(2, 1, 16, 64, dtype=CODES8), zeros(2, 1, 16, 68, dtype=CODES8), "key_cache"),
        (64, zeros(2, 1, 16, 68, dtype=CODES8), zeros(2, 1, 16, 64, dtype=CODES8), "value_cache"),
        (64, zeros(2, 1, 16, 68, dtype=CODES8), zeros(2, 1, 16, 68, dtype=CODES4), "value_cache"),
        (64, zeros(2, 1, 16, 36, dtype=CODES4), zeros(2, 1, 16, 68, dtype=CODES8), "value_cache"),
        (64, zeros(2, 1, 16, 68, dtype=CODES8), zeros(2, 1, 16, 64, dtype=FP8), "value_cache"),
        (64, zeros(2, 1, 16, 64, dtype=FP8), zeros(2, 1, 16, 36, dtype=CODES4), "value_cache"),
        (48, zeros(2, 1, 16, 51, dtype=CODES8), zeros(2, 1, 16, 51, dtype=CODES8), "key_cache"),
        (64, zeros(2, 1, 16, 68, dtype=CODES8), zeros(3, 1, 16, 68, dtype=CODES8), "value_cache"),
    ],
)
def test_caches_with_wrong_rows_are_refused(
    table: OpTable, d: int, key_cache: Tensor, value_cache: Tensor, names: str
) -> None:
    x, cache = torch.zeros(2, 1, d), CacheLayer(key_cache, value_cache)
    with pytest.raises(ValueError, match=names):
        table.write_kv(x, x, cache, torch.arange(2))
    one = torch.zeros(1, 1, dtype=torch.int32)
    rows = AttentionRows(one, torch.tensor([0, 2], dtype=torch.int32), one[0])
    with pytest.raises(ValueError, match=names):
        table.paged_attention(x, cache, rows, Scoring(1.0))
    batch = table.attention_batch(
        rows, torch.arange(2), *torch.zeros(2, 2, 2), num_pages=2, page_size=16
    )
    with pytest.raises(ValueError, match=r"qkv|cache"):
        table.attend_(torch.zeros(2, 3 * d), batch, cache, Scoring(1.0))
