"""Cache writes and attention of the reference table, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.ops.attention import AttentionBatch
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
from exl_core.ops.linear import PreparedInputs


class Sequences(NamedTuple):
    """Rows of each sequence and the pages of its keys."""

    page_table: Tensor
    row_starts: Tensor
    past_lens: Tensor

    def check(self, op: str, rows: int, page_size: int, num_pages: int) -> None:
        check(op, "page_table", self.page_table, (torch.int32,), None, None)
        check_contiguous(op, "page_table", self.page_table)
        seqs = self.page_table.shape[0]
        check(op, "row_starts", self.row_starts, (torch.int32,), seqs + 1)
        check(op, "past_lens", self.past_lens, (torch.int32,), seqs)
        starts = self.row_starts.tolist()
        if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
            raise OpInputError(f"{op}: row_starts (expected 0 to {rows} ascending, got {starts})")
        for seq, past in enumerate(self.past_lens.tolist()):
            count = starts[seq + 1] - starts[seq]
            if count == 0:
                continue
            pages = -(-(past + count) // page_size)
            if past < 0 or pages > self.page_table.shape[1]:
                raise OpInputError(
                    f"{op}: past_lens (sequence {seq}: {past} past positions and {count} rows need"
                    f" {pages} pages, the table has {self.page_table.shape[1]})"
                )
            check_range(op, "page_table", self.page_table[seq, :pages], num_pages)


class PlainBatch(NamedTuple):
    """Operands of `attention_batch`."""

    sequences: Sequences
    slots: Tensor
    cos: Tensor
    sin: Tensor
    num_pages: int
    page_size: int


class ReferenceAttentionOps:
    """AttentionOps in plain torch."""

    @staticmethod
    def write_kv(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> None:
        check("write_kv", "key", key, F32, None, None, None)
        check("write_kv", "value", value, F32, *key.shape)
        check_contiguous("write_kv", "key", key, 1)
        check_contiguous("write_kv", "value", value, 1)
        rows, heads, d = key.shape
        check_caches("write_kv", key_cache, value_cache, (None, heads, None), d)
        check("write_kv", "slots", slots, (torch.int64,), rows)
        page_size = key_cache.shape[2]
        check_range("write_kv", "slots", slots, key_cache.shape[0] * page_size)
        page, offset = slots // page_size, slots % page_size
        store_rows(key_cache, page, offset, key)
        store_rows(value_cache, page, offset, value)

    @staticmethod
    def paged_attention(  # noqa: PLR0917 - the op's operands
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        check_attention(q, key_cache, value_cache, Sequences(page_table, row_starts, past_lens))
        if window < 0 or not softcap >= 0.0:
            raise OpInputError(f"paged_attention: window {window} and softcap {softcap}")
        rows, heads, d = q.shape
        out = torch.empty(rows, heads, d)
        for seq in range(page_table.shape[0]):
            first, last = int(row_starts[seq]), int(row_starts[seq + 1])
            past = int(past_lens[seq])
            if first == last:
                continue
            end = past + last - first
            group = heads // key_cache.shape[1]
            keys = gather(key_cache, page_table[seq], end).repeat_interleave(group, dim=0)
            values = gather(value_cache, page_table[seq], end).repeat_interleave(group, dim=0)
            queries = q[first:last].double().transpose(0, 1)  # [heads, rows, d]
            scores = queries @ keys.transpose(1, 2) * scale  # [heads, rows, end]
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(past, end)[:, None]
            key = torch.arange(end)
            seen = key <= position
            if window > 0:
                seen &= key > position - window
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            # Values that no row attends to may hold NaN, and 0 * NaN is not 0.
            values = values.masked_fill(~seen.any(0)[None, :, None], 0.0)
            out[first:last] = (weights @ values).transpose(0, 1)
        return out.view(rows, heads * d)

    @staticmethod
    def attention_batch(  # noqa: PLR0917 - the parts of a batch
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
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
        sequences = Sequences(page_table, row_starts, past_lens)
        sequences.check(op, slots.shape[0], page_size, num_pages)
        check(op, "cos", cos, F32, slots.shape[0], None)
        check(op, "sin", sin, F32, *cos.shape)
        check_contiguous(op, "cos", cos)
        check_contiguous(op, "sin", sin)
        return PlainBatch(sequences, slots, cos, sin, num_pages, page_size)

    @staticmethod
    def attend_(  # noqa: PLR0917 - the op's operands
        qkv: Tensor,
        batch: AttentionBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        head_scale: Tensor | None = None,
        head_shift: Tensor | None = None,
        out: PreparedInputs | None = None,  # noqa: ARG004 - this table never makes one
    ) -> None:
        if not isinstance(batch, PlainBatch):
            raise OpInputError("attend_: batch (expected one of the reference table)")
        q, k, v = split_heads(qkv, batch, key_cache, value_cache)
        for norm, heads in ((q_norm, q), (k_norm, k)):
            if norm is not None:
                ReferenceElementwiseOps.rms_norm_heads_(heads, norm, eps)
        ReferenceElementwiseOps.rope_(q, batch.cos, batch.sin)
        ReferenceElementwiseOps.rope_(k, batch.cos, batch.sin)
        scale_heads_(q, k, head_scale, head_shift)
        ReferenceAttentionOps.write_kv(k, v, key_cache, value_cache, batch.slots)
        mixed = ReferenceAttentionOps.paged_attention(
            q, key_cache, value_cache, *batch.sequences, scale=scale, window=window, softcap=softcap
        )
        q.copy_(mixed.view(q.shape))


def gather(cache: Tensor, page_ids: Tensor, end: int) -> Tensor:
    """Reads the first `end` positions of a sequence: float64 [kv_heads, end, d]."""
    pages = -(-end // cache.shape[2])
    rows = torch.stack([cache[page_id] for page_id in page_ids[:pages].tolist()])
    return decode_rows(rows.transpose(0, 1).flatten(1, 2)[:, :end])


def split_heads(
    qkv: Tensor, batch: PlainBatch, key_cache: Tensor, value_cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values within a fused projection, [rows, heads, d] each."""
    op, pages, page_size = "attend_", batch.num_pages, batch.page_size
    check(op, "qkv", qkv, F32, batch.slots.shape[0], None)
    check_contiguous(op, "qkv", qkv, 1)
    d = head_dim_of(key_cache)
    check_caches(op, key_cache, value_cache, (pages, None, page_size), d)
    rows, width = qkv.shape
    kv_heads = key_cache.shape[1]
    q_heads = width // d - 2 * kv_heads if d > 0 else 0
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


def scale_heads_(q: Tensor, k: Tensor, scale: Tensor | None, shift: Tensor | None) -> None:
    """Replaces queries and keys [rows, heads, d] by x * scale + shift.

    `scale` and `shift` cover the query heads, then the key heads: [(q_heads + kv_heads) * d].
    """
    op = "attend_"
    if scale is None or shift is None:
        if scale is not shift:
            raise OpInputError(f"{op}: head_scale and head_shift (expected both or neither)")
        return
    heads, d = q.shape[1] + k.shape[1], q.shape[2]
    for name, given in (("head_scale", scale), ("head_shift", shift)):
        check(op, name, given, F32, heads * d)
        check_contiguous(op, name, given)
    factors, terms = (given.double().view(heads, d) for given in (scale, shift))
    for x, own in ((q, slice(q.shape[1])), (k, slice(q.shape[1], heads))):
        x.copy_(x.double() * factors[own] + terms[own])


def check_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, sequences: Sequences
) -> None:
    op = "paged_attention"
    check(op, "q", q, F32, None, None, None)
    check_contiguous(op, "q", q, 1)
    rows, heads, d = q.shape
    check_caches(op, key_cache, value_cache, (None, None, None), d)
    num_pages, kv_heads, page_size, _ = key_cache.shape
    if kv_heads < 1 or heads % kv_heads != 0:
        raise OpInputError(f"{op}: {kv_heads} kv heads do not divide {heads} query heads")
    sequences.check(op, rows, page_size, num_pages)


def check_caches(
    op: str,
    key_cache: Tensor,
    value_cache: Tensor,
    shape: tuple[int | None, int | None, int | None],
    head_dim: int,
) -> None:
    """Checks both caches. `shape` gives pages, heads and page size; None where unknown."""
    types = (*PLAIN_TYPES, *CODE_BITS)
    check(op, "key_cache", key_cache, types, *shape, None)
    kinds = (key_cache.dtype, torch.uint8)[: 2 if key_cache.dtype == torch.int8 else 1]
    check(op, "value_cache", value_cache, kinds, *key_cache.shape[:3], None)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype in CODE_BITS and head_dim % GROUP != 0:
            raise OpInputError(f"{op}: {name} (codes of heads of {head_dim})")
        check(op, name, cache, (cache.dtype,), None, None, None, row_size(cache.dtype, head_dim))
        check_contiguous(op, name, cache)


def store_rows(cache: Tensor, page: Tensor, offset: Tensor, x: Tensor) -> None:
    """Writes x [rows, heads, d] to cache[page, :, offset]."""
    rows = encode_rows(x, cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # torch can copy this type but not scatter it
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[page, :, offset] = rows
