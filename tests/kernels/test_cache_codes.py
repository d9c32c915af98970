"""Caches of 8 and 4 bits: rows to the bit, and attention over what they stand for."""

from __future__ import annotations

import pytest
import torch
from kernel_support import UNIT, PagedBatch, assert_within, normal, paged_batch, strided_rows
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.cache_rows import decode_rows, encode_rows, row_size
from exl_core.ops.open import available_isas, get_table
from exl_core.ops.table import OpTable
from support.profiles import first_by_default

# The others share their attention with avx512; a machine without that has nothing they add.
SHARED = {"avx512vnni", "amx"}

FP8, CODES8, CODES4 = torch.float8_e4m3fn, torch.int8, torch.uint8
KINDS = {"fp8": (FP8, FP8), "q8": (CODES8, CODES8), "q6": (CODES8, CODES4), "q4": (CODES4, CODES4)}
MIXED = [(0, 1), (7, 1), (299, 1), (45, 70), (131, 2), (0, 9)]

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
    """Both caches as bytes: the rows of [rows, heads, d] in order, in pages of 16."""
    rows, heads, d = key.shape
    caches = [
        torch.zeros(-(-rows // 16), heads, 16, row_size(kind, d), dtype=kind) for kind in kinds
    ]
    table.write_kv(key, value, CacheLayer(*caches), torch.arange(rows))
    return [cache.view(torch.uint8).transpose(1, 2).flatten(0, 1)[:rows] for cache in caches]


@pytest.mark.parametrize("kind", [CODES8, CODES4], ids=str)
def test_the_published_row_comes_out_to_the_bit(table: OpTable, kind) -> None:
    row = VECTOR.view(1, 1, 64)
    for cache in written(table, row, row, (kind, kind)):
        assert bytes(cache.flatten().tolist()).hex().upper() == VECTOR_ROWS[kind]

    stored = encode_rows(row, kind)
    decoded = decode_rows(stored, torch.float16).flatten()[:4].view(torch.int16)
    assert tuple(int(bits) & 0xFFFF for bits in decoded) == VECTOR_DECODED[kind]


def hadamard(points: int) -> Tensor:
    """Sylvester's order: -1 to the number of ones that both indices have."""
    return torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(points)] for i in range(points)],
        dtype=torch.float64,
    )


def transform(d: int) -> Tensor:
    """What a whole row is multiplied with to decode it, [d, d]."""
    matrix = torch.zeros(d, d, dtype=torch.float64)
    for start in range(0, d, 64):
        size = min(64, d - start)
        for parity in (0, 1):
            at = torch.arange(start + parity, start + size, 2)
            matrix[at[:, None], at] = hadamard(size // 2) * 2 / size
    return matrix


def scaled_codes(rows: Tensor, d: int) -> Tensor:
    """(code - h) * scale of rows [..., row], float64 [..., d]."""
    bits = 8 if rows.dtype == CODES8 else 4
    raw = rows.contiguous().view(torch.uint8)
    codes, scales = raw[..., : d * bits // 8].long(), raw[..., d * bits // 8 :].contiguous()
    if bits == 4:
        codes = torch.stack((codes % 16, codes // 16), dim=-1).flatten(-2)
    scale = scales.view(torch.float16).double().repeat_interleave(32, dim=-1)
    return (codes.double() - 2 ** (bits - 1)) * scale


@pytest.mark.parametrize("kind", [CODES8, CODES4], ids=str)
@pytest.mark.parametrize("d", [32, 64, 96, 160])
def test_decoding_is_the_matrix_of_the_format(rng, kind, d) -> None:
    rows = encode_rows(normal(rng, 50, d), kind)
    exact = scaled_codes(rows, d) @ transform(d)
    assert_within(decode_rows(rows), exact, 1e-12)
    # A decoder rounds the product, five stages and the result; at most 32 terms of size |y|.
    spread = scaled_codes(rows, d).abs() @ transform(d).abs()
    assert_within(decode_rows(rows, torch.float16), exact, 8 * HALF_UNIT * spread)


@pytest.mark.parametrize(("kind", "levels"), [(CODES8, 256), (CODES4, 16)])
@pytest.mark.parametrize("d", [32, 64, 96, 256])
def test_rounding_is_off_by_a_step_at_most(table: OpTable, rng, kind, levels, d) -> None:
    x = normal(rng, 40, 2, d)
    stored = written(table, x, x, (kind, kind))[0].contiguous().view(kind)
    y = x.half().double() @ torch.linalg.inv(transform(d))
    top = y.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=-1)
    # Half a step, or a whole one at +A, which has no code; in float16 the ratio, the code and the
    # scale are off by a unit of A each, and five sums by one of all that they add up.
    sums = x.half().double().abs() @ torch.linalg.inv(transform(d)).abs()
    bound = 2 / levels * top + HALF_UNIT * (4 * top + 6 * sums)
    assert_within(scaled_codes(stored, d), y, bound)


@pytest.mark.parametrize("kinds", list(KINDS.values()), ids=list(KINDS))
@pytest.mark.parametrize("d", [32, 64, 96, 128, 256, 320])
def test_rows_are_the_same_to_the_bit_in_every_table(kernels: OpTable, rng, kinds, d) -> None:
    """Of any size, and with what is no number in them: those scales are NaN."""
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
def test_zeros_stay_zero_and_no_number_stays_none(table: OpTable, kind) -> None:
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
def test_fp8_is_the_nearest_value_of_e4m3(table: OpTable, d) -> None:
    """Every float16 there is, and its neighbours in float32: ties go to even, too much to 448."""
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


def magnitudes(rows: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """|elements| that are multiplied, and the matrix that spreads errors in them, both float64."""
    if rows.dtype == FP8:
        return rows.double().abs(), torch.eye(d, dtype=torch.float64)
    return scaled_codes(rows, d).abs(), transform(d).abs()


def exact_attention(
    q: Tensor, batch: PagedBatch, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Float64 result over the decoded rows, and a bound on what float32 may do to it."""
    rows, heads, d = q.shape
    result, bound = (torch.empty(rows, heads, d, dtype=torch.float64) for _ in range(2))
    starts = batch.row_starts.tolist()
    for seq, past in enumerate(batch.past_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        end = past + last - first
        stored = [batch.stored_rows_of(c, seq, end) for c in (batch.key_cache, batch.value_cache)]
        group = heads // stored[0].shape[0]
        keys, values = (decode_rows(x).repeat_interleave(group, dim=0) for x in stored)
        (key_size, key_spread), (value_size, value_spread) = (magnitudes(x, d) for x in stored)
        key_size, value_size = (x.repeat_interleave(group, dim=0) for x in (key_size, value_size))
        queries = q[first:last].double().transpose(0, 1)
        ages = torch.arange(past, end)[:, None] - torch.arange(end)
        seen = (ages >= 0) & ((ages < window) if window > 0 else torch.tensor(True))
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        # As for plain caches, but that a query is rounded six times more before it meets codes,
        # and a result after it leaves them.
        terms = (queries.abs() @ key_spread) @ key_size.transpose(1, 2) * scale
        score_error = ((d + 9) * UNIT * terms).amax(-1) + 4 * UNIT * scores.abs().amax(-1)
        relative = 2 * score_error + (2 * end + 22) * UNIT
        spread = (weights @ value_size) @ value_spread
        result[first:last] = (weights @ values).transpose(0, 1)
        bound[first:last] = (relative[..., None] * spread).transpose(0, 1)
    return result.view(rows, heads * d), bound.view(rows, heads * d)


def check(
    table: OpTable, q: Tensor, batch: PagedBatch, *, window: int = 0, softcap: float = 0.0
) -> None:
    scale = q.shape[2] ** -0.5
    scoring = Scoring(scale, window, softcap)
    y = table.paged_attention(q, batch.cache, batch.attention_rows, scoring)
    assert_within(y, *exact_attention(q, batch, scale, window, softcap))


def packed_batch(
    rng, kind: str, sequences: list[tuple[int, int]], heads: tuple[int, int], page_size: int
) -> PagedBatch:
    """`heads`: how many of keys, and their size."""
    key_type, value_type = KINDS[kind]
    return paged_batch(
        rng,
        sequences,
        kv_heads=heads[0],
        head_dim=heads[1],
        page_size=page_size,
        dtype=key_type,
        value_dtype=value_type,
    )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "d", "page_size"),
    first_by_default(
        [(9, 3, 64, 256), (2, 2, 96, 48), (6, 2, 32, 16), (2, 1, 256, 16), (8, 2, 128, 64)], 3
    ),
)
def test_decode_and_prefill_mix_in_one_call(
    *, table: OpTable, rng, kind, q_heads, kv_heads, d, page_size
) -> None:
    batch = packed_batch(rng, kind, MIXED, (kv_heads, d), page_size)
    check(table, strided_rows(rng, batch.rows, q_heads, d), batch)


@pytest.mark.parametrize("d", [1, 20, 80])
def test_fp8_takes_any_head_dim(table: OpTable, rng, d) -> None:
    batch = packed_batch(rng, "fp8", [(70, 1), (3, 21)], (2, d), 16)
    check(table, strided_rows(rng, batch.rows, 4, d), batch)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("window", first_by_default([63, 200, 1, 64], 2))
def test_window_and_softcap_do_what_they_do_elsewhere(table: OpTable, rng, kind, window) -> None:
    batch = packed_batch(rng, kind, MIXED, (1, 64), 16)
    check(table, 5 * strided_rows(rng, batch.rows, 3, 64), batch, window=window, softcap=15.0)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("rows", first_by_default([1, 17, 130, 5, 65], 3))
def test_every_chunk_length_matches(table: OpTable, rng, kind, rows) -> None:
    batch = packed_batch(rng, kind, [(1100, rows)], (1, 32), 64)
    check(table, normal(rng, rows, 2, 32), batch)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("rows", [1, 40])
def test_no_number_in_the_cache_is_not_hidden(table: OpTable, rng, kind, rows) -> None:
    batch = packed_batch(rng, kind, [(5, rows)], (1, 32), 16)
    batch.key_cache.view(torch.uint8)[int(batch.page_table[0, 0]), 0, 2] = 255

    q = normal(rng, rows, 2, 32)
    y = table.paged_attention(q, batch.cache, batch.attention_rows, Scoring(0.2))

    assert y.isnan().all()


def test_attend_writes_and_reads_one_cache(table: OpTable, rng) -> None:
    """Bit for bit the ops that it is made of; the keys' rows say how long a head is."""
    for kind in KINDS:
        batch = packed_batch(rng, kind, [(40, 1), (0, 5)], (2, 64), 16)
        pages, _, page_size, _ = batch.key_cache.shape
        place = batch.page_table[0, 40 // 16].long() * 16 + 40 % 16
        slots = torch.cat([place[None], batch.page_table[1, 0].long() * 16 + torch.arange(5)])
        angle = normal(rng, 6, 32)
        cos, sin = angle.cos(), angle.sin()
        qkv = strided_rows(rng, 6, 8 * 64)
        q, k, v = qkv.clone().view(6, 8, 64).split([4, 2, 2], dim=1)
        caches = [
            cache.view(torch.uint8).clone().view(cache.dtype)
            for cache in (batch.key_cache, batch.value_cache)
        ]
        table.rope_(q, cos, sin)
        table.rope_(k, cos, sin)
        scoring, cache, rows = Scoring(0.1), CacheLayer(*caches), batch.attention_rows
        table.write_kv(k, v, cache, slots)
        expected = table.paged_attention(q, cache, rows, scoring)

        bound = table.attention_batch(rows, slots, cos, sin, num_pages=pages, page_size=page_size)
        table.attend_(qkv, bound, batch.cache, scoring)

        assert torch.equal(qkv[:, :256], expected)
        for got, wanted in zip((batch.key_cache, batch.value_cache), caches, strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


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
def test_rows_that_cannot_be_are_refused(table: OpTable, d, key_cache, value_cache, names) -> None:
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
