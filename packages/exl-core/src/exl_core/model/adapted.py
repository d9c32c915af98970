"""Adds LoRA deltas to the rows of a batch that use adapters.

Each range of rows is multiplied by its own low-rank pair. One pass therefore serves rows with
different adapters, and rows without adapters get the same results as in a pass without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.modules import Packed
from exl_core.model.adapters import Delta
from exl_core.model.batch import AdapterRows, Batch
from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable


def is_adapted(adapters: Sequence[AdapterRows], layer: int, matrix: Packed) -> bool:
    """Whether an adapter of any row changes this matrix."""
    return any(use.adapter.deltas(layer, matrix) for rows in adapters for use in rows.uses)


def add_deltas_(
    y: Tensor, x: Tensor, adapters: Sequence[AdapterRows], layer: int, matrix: Packed
) -> None:
    """y [R, out_features] += deltas of each row's adapters to that matrix, for inputs x [R, k]."""
    for first_row, last_row, uses in adapters:
        part = slice(first_row, last_row)
        for adapter, scale in ((use.adapter, use.scale) for use in uses):
            for delta in adapter.deltas(layer, matrix):
                _add(y[part], x[part].to(delta.down.dtype) @ delta.down, delta, scale)


def adapt_embedding_(x: Tensor, batch: Batch, ops: OpTable) -> None:
    """Applies the adapters' embeddings and embedding deltas to x [R, hidden], in place.

    Runs before the family's embedding scale. If several adapters of a row bring an embedding, the
    first adapter's is used.
    """
    token_ids = batch.token_ids.to(x.device)
    for first_row, last_row, uses in batch.adapters:
        part = slice(first_row, last_row)
        ends = [(use.adapter.ends, use.scale) for use in uses]
        own = next((e.embed for e, _ in ends if e is not None and e.embed is not None), None)
        if own is not None:
            x[part] = ops.embedding(token_ids[part], own)
        for end, scale in ends:
            if end is not None and end.embed_delta is not None:
                picked = end.embed_delta.down.index_select(0, token_ids[part])
                _add(x[part], picked, end.embed_delta, scale)


class HeadRows(NamedTuple):
    """Logits first .. last - 1 (indices into `logit_rows`) use this head, plus the deltas."""

    first: int
    last: int
    head: PackedLinear
    deltas: tuple[tuple[Delta, float], ...]


def head_rows(batch: Batch, base: PackedLinear) -> list[HeadRows]:
    """Ranges that cover all logits, in order, each with its head and deltas.

    If several adapters of a row bring a head, the first adapter's is used.
    """
    found: list[HeadRows] = []
    done, count = 0, batch.logit_rows.shape[0]
    for first_row, last_row, uses in batch.adapters:
        ends = [(use.adapter.ends, use.scale) for use in uses]
        head = next((e.head for e, _ in ends if e is not None and e.head is not None), base)
        deltas = tuple(
            (end.head_delta, scale)
            for end, scale in ends
            if end is not None and end.head_delta is not None
        )
        if head is base and not deltas:
            continue
        bounds = torch.tensor([first_row, last_row])
        first, last = torch.searchsorted(batch.logit_rows, bounds).tolist()
        if done < first:
            found.append(HeadRows(done, first, base, ()))
        if first < last:
            found.append(HeadRows(first, last, head, deltas))
        done = max(done, last)
    if done < count or not found:
        found.append(HeadRows(done, count, base, ()))
    return found


def add_to_logits_(logits: Tensor, x: Tensor, deltas: Sequence[tuple[Delta, float]]) -> None:
    """logits [n, vocab_size] += these head deltas for the normed states x [n, hidden]."""
    for delta, scale in deltas:
        _add(logits, x @ delta.down, delta, scale)


def _add(y: Tensor, h: Tensor, delta: Delta, scale: float) -> None:
    """y [m, out_features] += scale * (h [m, r] @ up), in the columns of the delta."""
    columns = y[:, delta.first_out : delta.first_out + delta.up.shape[1]]
    if columns.dtype is h.dtype:
        columns.addmm_(h, delta.up, alpha=scale)
    else:
        columns += (h @ delta.up).mul_(scale)
