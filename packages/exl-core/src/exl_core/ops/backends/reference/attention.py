"""Cache writes and attention of the reference table, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
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
from exl_core.ops.backends.reference.elementwise import ReferenceElementwiseOps
from exl_core.ops.cache_rows import (
    CODE_BITS,
    GROUP,
    PLAIN_TYPES,
    decode_rows,
    encode_rows,
    head_dim_of,
    row_size,
)
from exl_core.ops.checks import F32, OpInputError, check, check_contiguous, check_range
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import Inputs


class PlainBatch(NamedTuple):
    """Operands of `attention_batch`."""

    rows: AttentionRows
    slots: Tensor
    cos: Tensor
    sin: Tensor
    num_pages: int
    page_size: int


class ReferenceAttentionOps:
    """AttentionOps in plain torch."""

    @staticmethod
    def write_kv(key: Tensor, value: Tensor, cache: CacheLayer, slots: Tensor) -> None:
        check("write_kv", "key", key, F32, None, None, None)
        check("write_kv", "value", value, F32, *key.shape)
        check_contiguous("write_kv", "key", key, 1)
        check_contiguous("write_kv", "value", value, 1)
        rows, heads, d = key.shape
        check_cache("write_kv", cache, (None, heads, None), d)
        check("write_kv", "slots", slots, (torch.int64,), rows)
        num_pages, _, page_size, _ = cache.keys.shape
        check_range("write_kv", "slots", slots, num_pages * page_size)
        page, offset = slots // page_size, slots % page_size
        store_rows(cache.keys, page, offset, key)
        store_rows(cache.values, page, offset, value)

    @staticmethod
    def paged_attention(
        q: Tensor,
        cache: CacheLayer,
        rows: AttentionRows,
        scoring: Scoring,
        sinks: Tensor | None = None,
    ) -> Tensor:
        check_attention(q, cache, rows)
        if sinks is not None:
            check("paged_attention", "sinks", sinks, F32, q.shape[1])
        if scoring.window < 0 or not scoring.softcap >= 0.0:
            raise OpInputError(
                f"paged_attention: window {scoring.window} and softcap {scoring.softcap}"
            )
        num_rows, heads, d = q.shape
        group = heads // cache.keys.shape[1]
        out = torch.empty(num_rows, heads, d)
        for seq, pages in enumerate(rows.page_table):
            first, last = int(rows.row_starts[seq]), int(rows.row_starts[seq + 1])
            past = int(rows.past_lens[seq])
            if first == last:
                continue
            end = past + last - first
            keys = gather(cache.keys, pages, end).repeat_interleave(group, dim=0)
            values = gather(cache.values, pages, end).repeat_interleave(group, dim=0)
            queries = q[first:last].double().transpose(0, 1)  # [heads, rows, d]
            scores = queries @ keys.transpose(1, 2) * scoring.scale  # [heads, rows, end]
            if scoring.softcap > 0:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            position = torch.arange(past, end)[:, None]
            key = torch.arange(end)
            seen = key <= position
            if scoring.window > 0:
                seen &= key > position - scoring.window
            scores = scores.masked_fill(~seen, -torch.inf)
            weights = _softmax_with_sinks(scores, sinks)
            # Values that no row attends to may hold NaN, and 0 * NaN is not 0.
            values = values.masked_fill(~seen.any(0)[None, :, None], 0.0)
            out[first:last] = (weights @ values).transpose(0, 1)
        return out.view(num_rows, heads * d)

    @staticmethod
    def attention_batch(
        rows: AttentionRows,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        num_pages: int,
        page_size: int,
    ) -> AttentionBatch:
        op = "attention_batch"
        if num_pages < 1 or page_size < 1:
            raise OpInputError(f"{op}: page_size ({num_pages} pages of {page_size})")
        check(op, "slots", slots, (torch.int64,), None)
        check_contiguous(op, "slots", slots)
        check_range(op, "slots", slots, num_pages * page_size)
        check_rows(op, rows, slots.shape[0], num_pages=num_pages, page_size=page_size)
        check(op, "cos", cos, F32, slots.shape[0], None)
        check(op, "sin", sin, F32, *cos.shape)
        check_contiguous(op, "cos", cos)
        check_contiguous(op, "sin", sin)
        return PlainBatch(rows, slots, cos, sin, num_pages, page_size)

    @staticmethod
    def attend_(
        qkv: Tensor,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        *,
        norms: HeadNorms = NO_HEAD_NORMS,
        smoothing: KeySmoothing | None = None,
        sinks: Tensor | None = None,
        out: Inputs | None = None,  # noqa: ARG004 - this table makes no buffers for inputs
    ) -> Inputs:
        if not isinstance(batch, PlainBatch):
            raise OpInputError("attend_: batch (expected one of the reference table)")
        q, k, v = split_heads(qkv, batch, cache)
        for weight, heads in ((norms.q, q), (norms.k, k)):
            if weight is not None:
                ReferenceElementwiseOps.rms_norm_heads_(heads, RmsNorm(weight, norms.eps))
        ReferenceElementwiseOps.rope_(q, batch.cos, batch.sin)
        ReferenceElementwiseOps.rope_(k, batch.cos, batch.sin)
        if smoothing is not None:
            smooth_heads_(q, k, smoothing)
        ReferenceAttentionOps.write_kv(k, k if cache.is_shared else v, cache, batch.slots)
        mixed = ReferenceAttentionOps.paged_attention(q, cache, batch.rows, scoring, sinks)
        q.copy_(mixed.view(q.shape))
        return qkv[:, : mixed.shape[1]]


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of the keys, for scores [heads, rows, keys]."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def check_rows(op: str, rows: AttentionRows, count: int, *, num_pages: int, page_size: int) -> None:
    """Checks that the sequences have `count` rows in all, and that their pages exist."""
    page_table = rows.page_table
    check(op, "page_table", page_table, (torch.int32,), None, None)
    check_contiguous(op, "page_table", page_table)
    seqs = page_table.shape[0]
    check(op, "row_starts", rows.row_starts, (torch.int32,), seqs + 1)
    check(op, "past_lens", rows.past_lens, (torch.int32,), seqs)
    starts = rows.row_starts.tolist()
    if starts[0] != 0 or starts[-1] != count or starts != sorted(starts):
        raise OpInputError(f"{op}: row_starts (expected 0 to {count} ascending, got {starts})")
    for seq, past in enumerate(rows.past_lens.tolist()):
        own = starts[seq + 1] - starts[seq]
        if own == 0:
            continue
        pages = -(-(past + own) // page_size)
        if past < 0 or pages > page_table.shape[1]:
            raise OpInputError(
                f"{op}: past_lens (sequence {seq}: {past} past positions and {own} rows need"
                f" {pages} pages, the table has {page_table.shape[1]})"
            )
        check_range(op, "page_table", page_table[seq, :pages], num_pages)


def gather(cache: Tensor, page_ids: Tensor, end: int) -> Tensor:
    """Reads the first `end` positions of a sequence: float64 [kv_heads, end, d]."""
    pages = -(-end // cache.shape[2])
    rows = torch.stack([cache[page_id] for page_id in page_ids[:pages].tolist()])
    return decode_rows(rows.transpose(0, 1).flatten(1, 2)[:, :end])


def split_heads(qkv: Tensor, batch: PlainBatch, cache: CacheLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values within a fused projection, [rows, heads, d] each."""
    op, pages, page_size = "attend_", batch.num_pages, batch.page_size
    check(op, "qkv", qkv, F32, batch.slots.shape[0], None)
    check_contiguous(op, "qkv", qkv, 1)
    d = head_dim_of(cache.keys)
    check_cache(op, cache, (pages, None, page_size), d)
    rows, width = qkv.shape
    kv_heads = cache.keys.shape[1]
    q_heads = width // d - cache.heads_per_row if d > 0 else 0
    if kv_heads < 1 or d < 1 or width % d != 0 or q_heads < 1 or q_heads % kv_heads != 0:
        raise OpInputError(
            f"{op}: qkv (rows of {width} are no queries and {kv_heads} key and value heads of {d})"
        )
    heads = qkv.view(rows, width // d, d)
    return (
        heads[:, :q_heads],
        heads[:, q_heads : q_heads + kv_heads],
        heads[:, q_heads + kv_heads :],
    )


def smooth_heads_(q: Tensor, k: Tensor, smoothing: KeySmoothing) -> None:
    """Replaces queries and keys [rows, heads, d] by x * scale + shift."""
    op = "attend_"
    scale, shift = smoothing.scale, smoothing.shift
    heads, d = q.shape[1] + k.shape[1], q.shape[2]
    for name, given in (("head_scale", scale), ("head_shift", shift)):
        check(op, name, given, F32, heads * d)
        check_contiguous(op, name, given)
    factors, terms = (given.double().view(heads, d) for given in (scale, shift))
    for x, own in ((q, slice(q.shape[1])), (k, slice(q.shape[1], heads))):
        x.copy_(x.double() * factors[own] + terms[own])


def check_attention(q: Tensor, cache: CacheLayer, rows: AttentionRows) -> None:
    op = "paged_attention"
    check(op, "q", q, F32, None, None, None)
    check_contiguous(op, "q", q, 1)
    num_rows, heads, d = q.shape
    check_cache(op, cache, (None, None, None), d)
    num_pages, kv_heads, page_size, _ = cache.keys.shape
    if kv_heads < 1 or heads % kv_heads != 0:
        raise OpInputError(f"{op}: {kv_heads} kv heads do not divide {heads} query heads")
    check_rows(op, rows, num_rows, num_pages=num_pages, page_size=page_size)


def check_cache(
    op: str, cache: CacheLayer, shape: tuple[int | None, int | None, int | None], head_dim: int
) -> None:
    """Checks keys and values. `shape` gives pages, heads and page size; None where unknown."""
    keys, values = cache.keys, cache.values
    check(op, "key_cache", keys, (*PLAIN_TYPES, *CODE_BITS), *shape, None)
    types = (keys.dtype, torch.uint8)[: 2 if keys.dtype == torch.int8 else 1]
    check(op, "value_cache", values, types, *keys.shape[:3], None)
    for name, x in (("key_cache", keys), ("value_cache", values)):
        if x.dtype in CODE_BITS and head_dim % GROUP != 0:
            raise OpInputError(f"{op}: {name} (codes of heads of {head_dim})")
        check(op, name, x, (x.dtype,), None, None, None, row_size(x.dtype, head_dim))
        check_contiguous(op, name, x)


def store_rows(cache: Tensor, page: Tensor, offset: Tensor, x: Tensor) -> None:
    """Writes x [rows, heads, d] to cache[page, :, offset]."""
    rows = encode_rows(x, cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # torch can copy this type but not scatter it
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[page, :, offset] = rows
