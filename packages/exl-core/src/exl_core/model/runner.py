"""From a plan to logits: lays the segments out as tensors and runs the model once.

Knows what the model wants of a batch, and nothing of requests, pages' owners or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE
from exl_core.cache.store import KVStore
from exl_core.model.batch import Batch
from exl_core.model.segment import LogitRows, PageCopy, Segment


class ModelShape(Protocol):
    """The numbers of a model that the engine needs."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


class Model(Protocol):
    """A forward pass over a batch, keeping keys and values in a store."""

    @property
    def config(self) -> ModelShape: ...
    def forward(self, batch: Batch, store: KVStore) -> Tensor: ...


def make_batch(segments: Sequence[Segment], page_size: int = PAGE_SIZE) -> Batch:
    """Flatten the segments, in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_starts = [0]
    logit_rows: list[int] = []
    for segment in segments:
        first_row, count = len(token_ids), len(segment.token_ids)
        token_ids += segment.token_ids
        for position in range(segment.past_len, segment.past_len + count):
            page, offset = divmod(position, page_size)
            positions.append(position)
            slots.append(segment.page_ids[page] * page_size + offset)
        row_starts.append(first_row + count)
        if segment.logit_rows is LogitRows.ALL:
            logit_rows += range(first_row, first_row + count)
        elif segment.logit_rows is LogitRows.LAST:
            logit_rows.append(first_row + count - 1)
    longest = max(len(segment.page_ids) for segment in segments)
    tables = [
        list(segment.page_ids) + [0] * (longest - len(segment.page_ids)) for segment in segments
    ]
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),  # [rows]
        positions=torch.tensor(positions, dtype=torch.int64),  # [rows]
        row_starts=torch.tensor(row_starts, dtype=torch.int32),  # [seqs + 1]
        past_lens=torch.tensor([s.past_len for s in segments], dtype=torch.int32),  # [seqs]
        page_table=torch.tensor(tables, dtype=torch.int32),  # [seqs, pages]
        slots=torch.tensor(slots, dtype=torch.int64),  # [rows]
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),  # [n]
    )


class Runner:
    """A model together with the store that its pages lie in."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self.model = model
        self.store = store

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], copies: Sequence[PageCopy] = ()) -> Tensor:
        """Logits of the rows that the segments ask for, in order: [n, vocab_size].

        `copies` between pages come first.
        """
        self.store.copy_pages(copies)
        return self.model.forward(make_batch(segments, self.store.page_size), self.store)
