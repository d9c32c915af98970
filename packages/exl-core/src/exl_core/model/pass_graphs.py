"""Passes on a GPU as captured graphs: one launch for a whole pass.

A pass of a few hundred kernels takes the host longer to launch than the GPU to run, until it has
some thousand rows. A graph of it is captured once for each bucket of shapes and replayed; what
differs between passes of one bucket (tokens, where their pages are, which rows want logits) is
written into the graph's inputs with one copy. Rows that only fill up a bucket write to the store's
spare page; sequences that do so have no rows.

Steps of decoding, one row a sequence, are captured when they first come. Other passes (prompts,
verified drafts, both mixed with decoding) come in more shapes, so their graph is captured when a
bucket is met for the third time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
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

PROMPT_BUCKETS = (*BUCKETS, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
SEQUENCE_BUCKETS = (1, 4, 16, 64, 128)
MEETINGS = 3  # of a bucket, before it is worth a graph; a capture takes some ten passes' time
MOST_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a bucket. `logits`: of so many rows; as many as there are rows means all, in order."""

    rows: int
    sequences: int
    logits: int

    @property
    def is_decoding(self) -> bool:
        return self.rows == self.sequences


class Inputs:
    """Of one bucket: the batch as the GPU reads it, and the same memory as the host fills it."""

    def __init__(self, shape: Shape, pages: int, store: KVStore, spare_page: int) -> None:
        self.shape = shape
        self._page_size = store.page_size
        rows, seqs = shape.rows, shape.sequences
        wide, narrow = (rows, rows, rows, shape.logits), (seqs + 1, seqs, seqs * pages)
        size = 8 * sum(wide) + 4 * sum(narrow)
        is_far = store.device.type != "cpu"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_far)
        self._device = torch.zeros_like(self._host, device=store.device)
        self._but_tokens = self._device[8 * rows :], self._host[8 * rows :]

        def parts(memory: Tensor) -> tuple[Tensor, ...]:
            first = memory[: 8 * sum(wide)].view(torch.int64).split_with_sizes(wide)
            *second, table = memory[8 * sum(wide) :].view(torch.int32).split_with_sizes(narrow)
            return (*first, *second, table.view(seqs, pages))

        token_ids, positions, slots, logit_rows, row_starts, past_lens, table = parts(self._device)
        self.batch = Batch(
            token_ids=token_ids,
            positions=positions,
            row_starts=row_starts,
            past_lens=past_lens,
            page_table=table,
            slots=slots,
            logit_rows=logit_rows,
        )
        self._fields = tuple(part.numpy() for part in parts(self._host))
        self._spare = spare_page
        self._decoded: list[tuple[int, ...]] = []  # pages in the table, of passes that decode
        if shape.is_decoding:
            self._fill_any(())

    def fill(self, segments: Sequence[Segment], *, has_tokens: bool = False) -> None:
        """Begins the copy; the host's memory must have been read by the one before it. With
        `has_tokens` all but the tokens: those are on the device, or will be."""
        if self.shape.is_decoding:
            self._fill_decoding(segments)
        else:
            self._fill_any(segments)
        to, source = self._but_tokens if has_tokens else (self._device, self._host)
        to.copy_(source, non_blocking=True)

    def _fill_decoding(self, segments: Sequence[Segment]) -> None:
        """One row each, of mostly the same sequences as in the pass before."""
        token_ids, positions, slots, _, _, past_lens, table = self._fields
        count, size, held = len(segments), self._page_size, self._decoded
        past = [one.past_len for one in segments]
        token_ids[:count] = [one.token_ids[0] for one in segments]
        positions[:count] = past_lens[:count] = past
        slots[:count] = [
            one.page_ids[position // size] * size + position % size
            for one, position in zip(segments, past, strict=True)
        ]
        if count < len(held):
            unused = slice(count, len(held))
            token_ids[unused] = positions[unused] = past_lens[unused] = 0
            slots[unused], table[unused] = self._spare * size, self._spare
            del held[count:]
        held += [()] * (count - len(held))
        for i, one in enumerate(segments):
            if one.page_ids != held[i]:
                table[i, : len(one.page_ids)] = held[i] = one.page_ids

    def _fill_any(self, segments: Sequence[Segment]) -> None:
        token_ids, positions, slots, logit_rows, row_starts, past_lens, table = self._fields
        wants_all = self.shape.logits == self.shape.rows
        row = asked = 0
        for i, segment in enumerate(segments):
            past, count = segment.past_len, len(segment.token_ids)
            table[i, : len(segment.page_ids)] = segment.page_ids
            past_lens[i], row_starts[i] = past, row
            token_ids[row : row + count] = segment.token_ids
            positions[row : row + count] = np.arange(past, past + count)
            for of_page in segment.slots(self._page_size):
                slots[row : row + len(of_page)] = np.arange(of_page.start, of_page.stop)
                row += len(of_page)
            if segment.logit_rows is LogitRows.LAST and count and not wants_all:
                logit_rows[asked] = row - 1
                asked += 1
        unused, absent = slice(row, None), slice(len(segments), None)
        token_ids[unused] = positions[unused] = 0
        slots[unused] = self._spare * self._page_size
        table[absent], past_lens[absent] = self._spare, 0
        row_starts[absent] = row
        if self.shape.is_decoding:  # then every sequence has a row, wanted or not
            row_starts[absent] = range(row, self.shape.rows + 1)
        if wants_all:
            logit_rows[:] = range(self.shape.rows)
        else:
            logit_rows[asked:] = 0


class PassGraphs:
    """Passes over one model and one store."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self._model = model
        self._store = store
        self._pages = min(pages_for(model.config.max_seq_len), store.num_pages)
        self._graphs: dict[Shape, tuple[Inputs, torch.cuda.CUDAGraph, Tensor]] = {}
        self._met: Counter[Shape] = Counter()
        self._is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def next_ids(self, segments: Sequence[Segment]) -> Tensor | None:
        """Where such a pass reads its tokens, int64 [n] on the device; None unless it is a step of
        decoding that has a graph."""
        shape = shape_of(segments, self._pages)
        if shape is None or not shape.is_decoding or shape not in self._graphs:
            return None
        return self._graphs[shape][0].batch.token_ids[: len(segments)]

    def run(self, segments: Sequence[Segment], *, has_tokens: bool = False) -> Tensor | None:
        """Their logits [n, vocab_size], which the next run may overwrite; None where there is no
        graph for such a pass. `has_tokens`: they are where `next_ids` says, or will be."""
        shape = shape_of(segments, self._pages)
        if shape is None:
            return None
        if shape not in self._graphs:
            self._met[shape] += 1
            if not shape.is_decoding and (
                self._met[shape] < MEETINGS or len(self._graphs) >= MOST_GRAPHS
            ):
                return None
            self._graphs[shape] = self._capture(shape, segments)
        inputs, graph, logits = self._graphs[shape]
        self._is_read.synchronize()  # the host's memory, by the copy before this one
        inputs.fill(segments, has_tokens=has_tokens)
        self._is_read.record(torch.cuda.current_stream(self._store.device))
        graph.replay()
        return asked_for(logits, shape, segments)

    def _capture(
        self, shape: Shape, segments: Sequence[Segment]
    ) -> tuple[Inputs, torch.cuda.CUDAGraph, Tensor]:
        store, model = self._store, self._model
        model.reserve_positions(self._pages * store.page_size)
        inputs = Inputs(shape, self._pages, store, store.spare_page)
        inputs.fill(segments)
        model.forward(inputs.batch, store)  # loads kernels and workspaces, which a capture cannot
        torch.cuda.synchronize(store.device)
        graph = torch.cuda.CUDAGraph()
        pool = next((held.pool() for _, held, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            logits = model.forward(inputs.batch, store)
        return inputs, graph, logits


def shape_of(segments: Sequence[Segment], pages: int) -> Shape | None:
    """The bucket of a pass over up to `pages` pages each; None where no graph can stand for it."""
    counts = [len(one.token_ids) for one in segments]
    rows = sum(counts)
    is_small = 0 < rows <= PROMPT_BUCKETS[-1] and len(counts) <= SEQUENCE_BUCKETS[-1]
    if not is_small or not all(_is_plain(one, pages) for one in segments):
        return None
    is_decoding = max(counts) == min(counts) == 1
    if is_decoding and not any(one.logit_rows is LogitRows.NONE for one in segments):
        bucket = BUCKETS[bisect_left(BUCKETS, rows)]
        return Shape(bucket, bucket, bucket)
    bucket = PROMPT_BUCKETS[bisect_left(PROMPT_BUCKETS, rows)]
    sequences = SEQUENCE_BUCKETS[bisect_left(SEQUENCE_BUCKETS, len(counts))]
    sequences = min(sequences, bucket - 1)  # as many as rows would be decoding
    wants_all = any(one.logit_rows is LogitRows.ALL for one in segments)
    logits = bucket if wants_all else sequences
    if len(counts) >= rows or logits > BUCKETS[-1]:
        return None
    return Shape(bucket, sequences, logits)


def _is_plain(one: Segment, pages: int) -> bool:
    """Tokens and nothing but tokens."""
    is_known = not one.adapters and len(one.page_ids) <= pages
    return is_known and max(one.token_ids, default=0) < EMBEDDED_FROM


def asked_for(logits: Tensor, shape: Shape, segments: Sequence[Segment]) -> Tensor:
    """The rows that the segments ask for, in order, of a bucket's."""
    if shape.is_decoding:
        return logits[: len(segments)]
    if shape.logits != shape.rows:
        return logits[: sum(one.logit_rows is LogitRows.LAST for one in segments)]
    rows: list[int] = []
    first = 0
    for one in segments:
        last = first + len(one.token_ids)
        if one.logit_rows is LogitRows.ALL:
            rows += range(first, last)
        elif one.logit_rows is LogitRows.LAST:
            rows.append(last - 1)
        first = last
    if len(rows) == first:
        return logits[:first]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))
