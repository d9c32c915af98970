"""`attend_` against the four ops that it combines: head norms, RoPE, cache write, attention."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from kernel_support import attention_input, normal
from paged_support import PagedBatch, batch_of, paged_batch
from torch import Tensor

from exl_core.ops.attention import (
    NO_HEAD_NORMS,
    AttentionBatch,
    AttentionRows,
    CacheLayer,
    HeadNorms,
    KeySmoothing,
    Scoring,
)
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.table import OpTable

MIXED = [(0, 1), (299, 1), (0, 37), (131, 2), (600, 1), (5, 0), (0, 9)]
EPS = 1e-5


@pytest.fixture
def table(cpu_table: OpTable) -> OpTable:
    """Backends whose `attend_` runs the kernels of the separate ops."""
    return cpu_table


def slots_of(batch: PagedBatch) -> Tensor:
    """Cache slot of each row of the pass."""
    page_size = batch.key_cache.shape[2]
    starts, slots = batch.row_starts.tolist(), []
    for seq, past in enumerate(batch.past_lens.tolist()):
        at = torch.arange(past, past + starts[seq + 1] - starts[seq])
        slots.append(batch.page_table[seq].long()[at // page_size] * page_size + at % page_size)
    return torch.cat(slots)


def angles(rng: torch.Generator, rows: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = 100 * normal(rng, rows, pairs)
    return angle.cos(), angle.sin()


def bound_batch(
    table: OpTable, batch: PagedBatch, slots: Tensor, cos: Tensor, sin: Tensor
) -> AttentionBatch:
    num_pages, _, page_size, _ = batch.key_cache.shape
    return table.attention_batch(
        batch.attention_rows,
        slots,
        cos,
        sin,
        num_pages=num_pages,
        page_size=page_size,
    )


@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "head-norms"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("sequences", "window", "softcap"),
    [([(17, 1)], 0, 0.0), ([(0, 3)], 0, 0.0), (MIXED, 0, 0.0), (MIXED, 50, 20.0)],
    ids=["decode", "short-prompt", "mixed", "windowed"],
)
def test_attend_is_norms_rope_write_and_attention(
    *,
    table: OpTable,
    rng: torch.Generator,
    sequences: list[tuple[int, int]],
    window: int,
    softcap: float,
    dtype: torch.dtype,
    with_norms: bool,
) -> None:
    """Bit for bit, because the same kernels run."""
    heads, kv_heads, d = 6, 2, 24
    batch = paged_batch(rng, sequences, kv_heads=kv_heads, head_dim=d, page_size=16, dtype=dtype)
    slots, (cos, sin) = slots_of(batch), angles(rng, batch.rows, 9)
    qkv = attention_input(table, rng, batch.rows, (heads + 2 * kv_heads) * d)
    norms = HeadNorms(normal(rng, d), normal(rng, d), EPS) if with_norms else NO_HEAD_NORMS
    sinks = normal(rng, heads) if with_norms else None

    q, k, v = torch.split(qkv.clone().view(batch.rows, -1, d), [heads, kv_heads, kv_heads], dim=1)
    for x, weight in ((q, norms.q), (k, norms.k)):
        if weight is not None:
            table.rms_norm_heads_(x, RmsNorm(weight, EPS))
        table.rope_(x, cos, sin)
    caches = [batch.key_cache.clone(), batch.value_cache.clone()]
    cache, scoring = CacheLayer(*caches), Scoring(0.3, window, softcap)
    table.write_kv(k, v, cache, slots)
    expected = table.paged_attention(q, cache, batch.attention_rows, scoring, sinks)

    bound = bound_batch(table, batch, slots, cos, sin)
    y = cast(Tensor, table.attend_(qkv, bound, batch.cache, scoring, norms=norms, sinks=sinks))

    assert torch.equal(y, expected)
    assert torch.equal(y, qkv[:, : heads * d]), "the result replaces the queries"
    for written, wanted in zip((batch.key_cache, batch.value_cache), caches, strict=True):
        assert torch.equal(written.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


@pytest.mark.parametrize("with_norms", [False, True], ids=["", "norms"])
def test_attention_without_rope(table: OpTable, rng: torch.Generator, with_norms: bool) -> None:
    """Angles of no pairs: [rows, 0]."""
    heads, kv_heads, d = 6, 2, 24
    batch = paged_batch(
        rng, MIXED, kv_heads=kv_heads, head_dim=d, page_size=16, dtype=torch.float32
    )
    slots, (cos, sin) = slots_of(batch), angles(rng, batch.rows, 0)
    assert cos.shape == (batch.rows, 0)
    qkv = attention_input(table, rng, batch.rows, (heads + 2 * kv_heads) * d)
    norms = HeadNorms(normal(rng, d), normal(rng, d), EPS) if with_norms else NO_HEAD_NORMS

    q, k, v = torch.split(qkv.clone().view(batch.rows, -1, d), [heads, kv_heads, kv_heads], dim=1)
    for x, weight in ((q, norms.q), (k, norms.k)):
        if weight is not None:
            table.rms_norm_heads_(x, RmsNorm(weight, EPS))
    cache = CacheLayer(batch.key_cache.clone(), batch.value_cache.clone())
    table.write_kv(k, v, cache, slots)
    expected = table.paged_attention(q, cache, batch.attention_rows, Scoring(0.3))

    bound = bound_batch(table, batch, slots, cos, sin)
    assert torch.equal(
        cast(Tensor, table.attend_(qkv, bound, batch.cache, Scoring(0.3), norms=norms)), expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["floats", "codes"])
def test_heads_are_scaled_and_shifted_after_rope(
    table: OpTable, rng: torch.Generator, dtype: torch.dtype
) -> None:
    heads, kv_heads, d = 4, 2, 32
    batch = paged_batch(rng, MIXED, kv_heads=kv_heads, head_dim=d, page_size=16, dtype=dtype)
    slots, (cos, sin) = slots_of(batch), angles(rng, batch.rows, 9)
    qkv = attention_input(table, rng, batch.rows, (heads + 2 * kv_heads) * d)
    scale, shift = 1 + normal(rng, (heads + kv_heads) * d) / 4, normal(rng, (heads + kv_heads) * d)

    turned = qkv.clone()
    q, k, v = torch.split(turned.view(batch.rows, -1, d), [heads, kv_heads, kv_heads], dim=1)
    both = turned.view(batch.rows, -1, d)[:, : heads + kv_heads]
    table.rope_(both, cos, sin)
    both.copy_(both.double() * scale.view(-1, d) + shift.view(-1, d))
    caches = [batch.key_cache.clone(), batch.value_cache.clone()]
    cache, scoring = CacheLayer(*caches), Scoring(0.3)
    table.write_kv(k, v, cache, slots)
    expected = table.paged_attention(q, cache, batch.attention_rows, scoring)

    bound = bound_batch(table, batch, slots, cos, sin)
    table.attend_(qkv, bound, batch.cache, scoring, smoothing=KeySmoothing(scale, shift))

    torch.testing.assert_close(qkv[:, : heads * d], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(batch.value_cache.nan_to_num(nan=7.0), caches[1].nan_to_num(nan=7.0))


def test_attend_writes_and_reads_a_cache_of_codes(table: OpTable, rng: torch.Generator) -> None:
    """Bit for bit, for caches whose rows do not have the length of a head."""
    for name in ("fp8", "q8", "q6", "q4"):
        batch = batch_of(rng, name, [(40, 1), (0, 5)], (2, 64, 16))
        pages, _, page_size, _ = batch.key_cache.shape
        place = batch.page_table[0, 40 // 16].long() * 16 + 40 % 16
        slots = torch.cat([place[None], batch.page_table[1, 0].long() * 16 + torch.arange(5)])
        angle = normal(rng, 6, 32)
        cos, sin = angle.cos(), angle.sin()
        qkv = attention_input(table, rng, 6, 8 * 64)
        q, k, v = torch.split(qkv.clone().view(6, 8, 64), [4, 2, 2], dim=1)
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


def test_key_smoothing_leaves_the_result_unchanged(table: OpTable, rng: torch.Generator) -> None:
    """Softmax ignores a shift of all keys. Scales of queries and keys cancel in their product."""
    heads, kv_heads, d = 4, 2, 16
    sequences = [(0, 37), (0, 1), (0, 9)]  # all keys come from this pass
    batch = paged_batch(
        rng, sequences, kv_heads=kv_heads, head_dim=d, page_size=16, dtype=torch.float32
    )
    slots, (cos, sin) = slots_of(batch), angles(rng, batch.rows, 8)
    qkv = normal(rng, batch.rows, (heads + 2 * kv_heads) * d)
    divisor = 0.5 + torch.rand(kv_heads, d, generator=rng)
    of_queries = divisor.repeat_interleave(heads // kv_heads, dim=0)
    scale = torch.cat([of_queries, 1 / divisor]).flatten()
    shift = torch.cat([torch.zeros_like(of_queries), normal(rng, kv_heads, d)]).flatten()

    def attended(smoothing: KeySmoothing | None = None) -> Tensor:
        x, bound = qkv.clone(), bound_batch(table, batch, slots, cos, sin)
        table.attend_(x, bound, batch.cache, Scoring(0.25), smoothing=smoothing)
        return x[:, : heads * d]

    fitted = attended(KeySmoothing(scale, shift))
    torch.testing.assert_close(fitted, attended(), rtol=1e-4, atol=1e-4)


def test_one_batch_serves_every_layer(table: OpTable, rng: torch.Generator) -> None:
    """Its operands may change afterwards, except on the reference backend."""
    batch = paged_batch(
        rng, [(20, 1), (3, 4)], kv_heads=1, head_dim=16, page_size=8, dtype=torch.float32
    )
    slots, (cos, sin) = slots_of(batch), angles(rng, batch.rows, 8)
    layers = [normal(rng, batch.rows, 4 * 16) for _ in range(2)]
    caches = (batch.key_cache, batch.value_cache)

    def attended(x: Tensor, bound: AttentionBatch) -> Tensor:
        qkv = x.clone()
        table.attend_(qkv, bound, CacheLayer(*(c.clone() for c in caches)), Scoring(0.25))
        return qkv

    expected = [attended(x, bound_batch(table, batch, slots, cos, sin)) for x in layers]

    bound = bound_batch(table, batch, slots, cos, sin)
    if table.name != "reference":  # it copies nothing
        for tensor in (batch.page_table, batch.row_starts, batch.past_lens, slots, cos, sin):
            tensor.fill_(-1)
    got = [attended(x, bound) for x in layers]

    assert all(torch.equal(a[:, :32], b[:, :32]) for a, b in zip(got, expected, strict=True))


def test_attend_takes_no_rows(table: OpTable) -> None:
    empty = torch.empty(0, 4)
    none = torch.zeros(1, dtype=torch.int32)
    bound = table.attention_batch(
        AttentionRows(torch.zeros(0, 1, dtype=torch.int32), none, none[:0]),
        torch.zeros(0, dtype=torch.int64),
        empty,
        empty,
        num_pages=1,
        page_size=8,
    )
    caches = torch.zeros(2, 1, 1, 8, 8)

    table.attend_(torch.empty(0, 4 * 8), bound, CacheLayer(*caches), Scoring(1.0))

    assert not caches.any()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bind(
    table: OpTable, page_table: Tensor, row_starts: Tensor, past_lens: Tensor, **operands: Any
) -> AttentionBatch:
    rows = AttentionRows(page_table, row_starts, past_lens)
    return table.attention_batch(rows, **operands)


def batch_operands() -> dict[str, Any]:
    return {
        "page_table": ints(0, 1, 2, 3).view(2, 2),
        "row_starts": ints(0, 2, 3),
        "past_lens": ints(20, 16),
        "slots": torch.tensor([20, 21, 48]),
        "cos": torch.ones(3, 4),
        "sin": torch.zeros(3, 4),
        "num_pages": 4,
        "page_size": 16,
    }


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"page_table": ints(0, 1, 4, 3).view(2, 2)}, "page_table"),
        ({"page_table": ints(0, -1, 2, 3).view(2, 2)}, "page_table"),
        ({"page_table": torch.zeros(2, 2, dtype=torch.int64)}, "page_table"),
        ({"page_table": ints(0, 1).view(2, 1)}, "page_table|past_lens"),
        ({"past_lens": ints(31, 31)}, "page_table|past_lens"),
        ({"past_lens": ints(-1, 16)}, "past_lens"),
        ({"row_starts": ints(0, 1, 2)}, "row_starts"),
        ({"row_starts": ints(1, 2, 3)}, "row_starts"),
        ({"row_starts": ints(0, 4, 3)}, "row_starts"),
        ({"slots": torch.tensor([20, 21])}, "row_starts"),
        ({"slots": torch.tensor([20, 21, 64])}, "slots"),
        ({"slots": torch.tensor([20, -1, 48])}, "slots"),
        ({"slots": ints(20, 21, 48)}, "slots"),
        ({"cos": torch.ones(2, 4)}, "cos"),
        ({"cos": torch.ones(4, 3).T}, "cos"),
        ({"sin": torch.ones(3, 3)}, "sin"),
        ({"sin": torch.ones(3, 4).double()}, "sin"),
        ({"num_pages": 3}, "slots|page_table"),
        ({"num_pages": 0}, "page"),
        ({"page_size": 0}, "page"),
    ],
)
def test_a_batch_outside_of_the_cache_is_refused(
    table: OpTable, change: dict[str, Any], names: str
) -> None:
    bind(table, **batch_operands())
    with pytest.raises(ValueError, match=names):
        bind(table, **(batch_operands() | change))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"qkv": torch.zeros(2, 64)}, "qkv"),
        ({"qkv": torch.zeros(3, 60)}, "qkv"),
        ({"qkv": torch.zeros(3, 32)}, "qkv"),
        ({"qkv": torch.zeros(3, 56)}, "qkv"),
        ({"qkv": torch.zeros(3, 64).double()}, "qkv"),
        ({"qkv": torch.zeros(64, 3).T}, "qkv"),
        ({"key_cache": torch.zeros(3, 2, 16, 8)}, "key_cache"),
        ({"key_cache": torch.zeros(4, 2, 8, 8)}, "key_cache"),
        ({"key_cache": torch.zeros(4, 2, 16, 4)}, "cos|cache"),
        ({"key_cache": torch.zeros(4, 2, 16, 8).bfloat16()}, "key_cache"),
        ({"value_cache": torch.zeros(4, 2, 16, 8).half()}, "value_cache"),
        ({"value_cache": torch.zeros(4, 16, 2, 8).transpose(1, 2)}, "value_cache"),
        ({"norms": HeadNorms(torch.ones(7), None, EPS)}, "q_norm|weight"),
        ({"norms": HeadNorms(None, torch.ones(8).half(), EPS)}, "k_norm|weight"),
        ({"window": -1}, "window"),
        ({"softcap": torch.nan}, "softcap"),
        ({"smoothing": KeySmoothing(torch.ones(48), torch.ones(47))}, "head_shift"),
        ({"smoothing": KeySmoothing(torch.ones(48).half(), torch.ones(48))}, "head_scale"),
        ({"smoothing": KeySmoothing(torch.ones(6, 8), torch.ones(48))}, "head_scale"),
        ({"smoothing": KeySmoothing(torch.ones(48), None)}, "head_shift"),  # type: ignore[arg-type]
        ({"smoothing": KeySmoothing(None, torch.ones(48))}, "head_s"),  # type: ignore[arg-type]
    ],
)
def test_attend_refuses_operands_that_do_not_fit_its_batch(
    table: OpTable, change: dict[str, Any], names: str
) -> None:
    operands: dict[str, Any] = {
        "qkv": torch.zeros(3, 64),
        "batch": bind(table, **batch_operands()),
        "key_cache": torch.zeros(4, 2, 16, 8),
        "value_cache": torch.zeros(4, 2, 16, 8),
    }

    def attend(
        qkv: Tensor,
        batch: AttentionBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        window: int = 0,
        softcap: float = 0.0,
        **layer: Any,
    ) -> None:
        cache, scoring = CacheLayer(key_cache, value_cache), Scoring(1.0, window, softcap)
        table.attend_(qkv, batch, cache, scoring, **layer)

    attend(**operands)
    with pytest.raises(ValueError, match=names):
        attend(**(operands | change))
