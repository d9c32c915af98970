"""Decoding steps on a GPU as captured graphs: one launch for a whole pass.

A pass of a few hundred kernels takes the host longer to launch than the GPU to run. A graph of it
is captured once for each bucket of batch sizes and replayed; what differs between steps, tokens and
where their pages are, is written into the graph's inputs with one copy. Rows that only fill up a
bucket write to the store's spare page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_core.cache.format import pages_for
from exl_core.cache.store import KVStore
from exl_core.model.batch import Batch
from exl_core.model.embedded import EMBEDDED_FROM
from exl_core.model.segment import LogitRows, Segment

if TYPE_CHECKING:
    from exl_core.model.runner import Model

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Close together where most batches are: a row too many costs little, a graph some memory."""


class _Inputs:
    """Of one bucket: the batch as the GPU reads it, and the same memory as the host fills it."""

    def __init__(self, rows: int, pages: int, store: KVStore) -> None:
        self.rows = rows
        self._page_size = store.page_size
        # int64: token ids, positions, slots; then int32: lengths, page tables.
        wide, narrow = 3 * rows, rows + rows * pages
        self._host = torch.zeros(8 * wide + 4 * narrow, dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros_like(self._host, device=store.device)

        def parts(memory: Tensor) -> tuple[Tensor, ...]:
            first = memory[: 8 * wide].view(torch.int64).view(3, rows)
            second = memory[8 * wide :].view(torch.int32)
            return (*first.unbind(), second[:rows], second[rows:].view(rows, pages))

        token_ids, positions, slots, past_lens, page_table = parts(self._device)
        self.batch = Batch(
            token_ids=token_ids,
            positions=positions,
            row_starts=torch.arange(rows + 1, dtype=torch.int32, device=store.device),
            past_lens=past_lens,
            page_table=page_table,
            slots=slots,
            logit_rows=torch.arange(rows, device=store.device),
        )
        self._fields = tuple(part.numpy() for part in parts(self._host))
        self._spare = store.spare_page
        self._fields[2][:] = self._spare * self._page_size
        self._fields[4][:] = self._spare
        self._is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, segments: Sequence[Segment]) -> None:
        self._is_free.synchronize()  # the copy before this one has read the host's memory
        token_ids, positions, slots, past_lens, page_table = self._fields
        for row, segment in enumerate(segments):
            past = segment.past_len
            page, offset = divmod(past, self._page_size)
            token_ids[row] = segment.token_ids[0]
            positions[row] = past_lens[row] = past
            slots[row] = segment.page_ids[page] * self._page_size + offset
            page_table[row, : len(segment.page_ids)] = segment.page_ids
        unused = slice(len(segments), None)
        token_ids[unused] = positions[unused] = past_lens[unused] = 0
        slots[unused] = self._spare * self._page_size
        page_table[unused] = self._spare
        self._device.copy_(self._host, non_blocking=True)
        self._is_free.record()


class DecodeGraphs:
    """Passes of one row a sequence over one model and one store."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self._model = model
        self._store = store
        self._pages = min(pages_for(model.config.max_seq_len), store.num_pages)
        self._graphs: dict[int, tuple[_Inputs, torch.cuda.CUDAGraph, Tensor]] = {}

    def can_run(self, segments: Sequence[Segment]) -> bool:
        """Whether each segment is one token that wants logits, and nothing but a token."""
        return 0 < len(segments) <= BUCKETS[-1] and all(
            len(one.token_ids) == 1
            and one.logit_rows is not LogitRows.NONE
            and not one.adapters
            and one.token_ids[0] < EMBEDDED_FROM
            and len(one.page_ids) <= self._pages
            for one in segments
        )

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """Their logits [n, vocab_size]; the next run of as many overwrites them."""
        rows = BUCKETS[bisect_left(BUCKETS, len(segments))]
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(rows, segments)
        inputs, graph, logits = self._graphs[rows]
        inputs.fill(segments)
        graph.replay()
        return logits[: len(segments)]

    def _capture(
        self, rows: int, segments: Sequence[Segment]
    ) -> tuple[_Inputs, torch.cuda.CUDAGraph, Tensor]:
        store, model = self._store, self._model
        model.reserve_positions(self._pages * store.page_size)
        inputs = _Inputs(rows, self._pages, store)
        inputs.fill(segments)
        model.forward(inputs.batch, store)  # loads kernels and workspaces, which a capture cannot
        torch.cuda.synchronize(store.device)
        graph = torch.cuda.CUDAGraph()
        pool = next((held.pool() for _, held, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            logits = model.forward(inputs.batch, store)
        return inputs, graph, logits
