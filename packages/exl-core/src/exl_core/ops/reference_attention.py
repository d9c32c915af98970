"""Parts of the reference attention: sequences, cache reads, head views and their checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.ops.checks import OpInputError, check, check_contiguous, check_range
from exl_core.ops.reference_cache import check_caches, decode_rows, head_dim_of

F32 = (torch.float32,)


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
