"""CUDA graphs of forward passes: the host replays a whole pass with one launch.

Launching the few hundred kernels of a pass takes the host longer than running them takes the GPU,
up to one or two thousand rows. A graph is therefore captured once per bucket of shapes and
replayed. Passes of one bucket differ in tokens, page ids and the rows that want logits; one copy
writes these into the graph's input tensors. Padding rows write their keys and values to the store's
spare page. Padding sequences have no rows, or one padding row each in decode, which changes the
spare slot of recurrent states.

A decode pass (one row per sequence) is captured when its bucket first occurs. Other passes (prompt
chunks, verification of drafts, either of them mixed with decode) come in more shapes. Their graph
is captured when the bucket occurs for the third time.
"""

from __future__ import annotations

import gc
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat, pages_for
from exl_core.cache.store import KVStore
from exl_core.model.batch import Batch
from exl_core.model.embedded import EMBEDDED_FROM
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.attention import MANY_QUERIES

if TYPE_CHECKING:
    from exl_core.model.protocol import Model

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Row counts of decode passes. Denser for small batches, which are the most frequent: padding rows
cost little time, and each graph costs some memory."""

# Row counts and sequence counts of other passes.
PROMPT_BUCKETS = (*BUCKETS, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
LONG_BUCKETS = (*PROMPT_BUCKETS, 1280, 1536, 1792, 2048)
"""Row counts of other passes of ranks, and of passes that begin a sequence. Up to 2048 rows,
launches take a slow host longer than a rank's part of the work takes its GPU, or even all of it."""

LEAST_FILLED = 15 / 16
"""Share of a long bucket's rows that a pass on one GPU needs: padding takes the GPU time, too. Not
measured."""

LONG_PASS_BYTES = 2 << 30
"""Memory of a GPU that must be free before a pass of more rows than `PROMPT_BUCKETS` is captured.
The graphs keep the activations of their largest pass, beside those of passes that are not
captured."""

SEQUENCE_BUCKETS = (1, 4, 16, 64, 128)
PASSES_BEFORE_CAPTURE = 3
"""A bucket's graph is captured at its third pass; a capture takes as long as about ten passes."""

MAX_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one bucket. `logits` is the number of rows that get logits; if it equals `rows`, all
    rows get logits, in order. `is_fresh`: the rows begin one sequence (`AttentionRows`)."""

    rows: int
    sequences: int
    logits: int
    is_fresh: bool = False

    @property
    def is_decoding(self) -> bool:
        return self.rows == self.sequences


HOST_BUFFERS = 4
"""Fewest pinned buffers of a graph's inputs, used in turn: passes that are launched before the GPU
has read the inputs of earlier ones. Layers on several GPUs need one for each part of a pass."""


class _HostBuffer:
    """Pinned memory from which inputs are copied to the GPU."""

    def __init__(self, size: int, fields: Callable[[Tensor], tuple[Tensor, ...]], *, is_gpu: bool):
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=is_gpu)
        self.fields = tuple(field.numpy() for field in fields(self.memory))
        # Page ids that the last decode pass left in each row of the page table.
        self.written_pages: list[tuple[int, ...]] = []
        self._copied = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until the GPU has read the memory."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, target: Tensor, start: int) -> None:
        """Starts the copy of the memory from byte `start` on, without waiting for it."""
        target.copy_(self.memory[start:], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(target.device))


class GraphInputs:
    """Input tensors of one bucket's graph, and the host buffers that they are copied from."""

    def __init__(
        self,
        shape: Shape,
        pages: int,
        page_size: int,
        spare_page: int,
        device: torch.device,
        *,
        spare_state: int | None = None,
        num_buffers: int = HOST_BUFFERS,
    ) -> None:
        """`spare_state`: slot of the states of padding sequences; None for a model without any."""
        self.shape = shape
        self._page_size = page_size
        rows, seqs = shape.rows, shape.sequences
        sizes64 = (rows, rows, rows, shape.logits, 0 if spare_state is None else seqs)
        sizes32 = (seqs + 1, seqs, seqs * pages)
        size = 8 * sum(sizes64) + 4 * sum(sizes32)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._all_but_tokens = self._device[8 * rows :]

        def fields(memory: Tensor) -> tuple[Tensor, ...]:
            first = memory[: 8 * sum(sizes64)].view(torch.int64).split_with_sizes(sizes64)
            *second, table = memory[8 * sum(sizes64) :].view(torch.int32).split_with_sizes(sizes32)
            return (*first, *second, table.view(seqs, pages))

        token_ids, positions, slots, logit_rows, states, row_starts, past_lens, table = fields(
            self._device
        )
        self.batch = Batch(
            token_ids=token_ids,
            positions=positions,
            row_starts=row_starts,
            past_lens=past_lens,
            page_table=table,
            slots=slots,
            logit_rows=logit_rows,
            states=None if spare_state is None else states,
            is_fresh=shape.is_fresh,
        )
        self._spare, self._spare_state = spare_page, spare_state
        self._buffers = deque(
            _HostBuffer(size, fields, is_gpu=device.type != "cpu") for _ in range(num_buffers)
        )
        if shape.is_decoding:
            for buffer in self._buffers:
                self._fill_any(buffer, ())

    def fill(self, segments: Sequence[Segment], *, has_tokens: bool = False) -> None:
        """Fills a host buffer and starts its copy to the device, without waiting for the copy.

        With `has_tokens` the token ids are not copied: the device has them, or earlier work on the
        stream writes them.
        """
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.wait()
        if self.shape.is_decoding:
            self._fill_decoding(buffer, segments)
        else:
            self._fill_any(buffer, segments)
        if self._spare_state is not None:
            self._fill_states(buffer, segments, self._spare_state)
        target = self._all_but_tokens if has_tokens else self._device
        buffer.copy_to(target, len(self._device) - len(target))

    @staticmethod
    def _fill_states(buffer: _HostBuffer, segments: Sequence[Segment], spare: int) -> None:
        states = buffer.fields[4]
        slots = [one.state_slot for one in segments]
        assert None not in slots, "the engine gives every sequence of such a model a slot"
        states[: len(segments)] = slots
        states[len(segments) :] = spare

    def _fill_decoding(self, buffer: _HostBuffer, segments: Sequence[Segment]) -> None:
        """One row per segment. Page tables are rewritten only where they differ from the previous
        pass, which mostly had the same sequences."""
        token_ids, positions, slots, _, _, _, past_lens, table = buffer.fields
        count, size, written = len(segments), self._page_size, buffer.written_pages
        past = [one.past_len for one in segments]
        token_ids[:count] = [one.token_ids[0] for one in segments]
        positions[:count] = past_lens[:count] = past
        slots[:count] = [
            one.page_ids[position // size] * size + position % size
            for one, position in zip(segments, past, strict=True)
        ]
        if count < len(written):
            unused = slice(count, len(written))
            token_ids[unused] = positions[unused] = past_lens[unused] = 0
            slots[unused], table[unused] = self._spare * size, self._spare
            del written[count:]
        written += [()] * (count - len(written))
        for i, one in enumerate(segments):
            if one.page_ids != written[i]:
                table[i, : len(one.page_ids)] = written[i] = one.page_ids

    def _fill_any(self, buffer: _HostBuffer, segments: Sequence[Segment]) -> None:
        token_ids, positions, slots, logit_rows, _, row_starts, past_lens, table = buffer.fields
        wants_all = self.shape.logits == self.shape.rows
        row = num_logits = 0
        for i, segment in enumerate(segments):
            past, count = segment.past_len, len(segment.token_ids)
            table[i, : len(segment.page_ids)] = segment.page_ids
            past_lens[i], row_starts[i] = past, row
            token_ids[row : row + count] = segment.token_ids
            positions[row : row + count] = np.arange(past, past + count)
            for page_slots in segment.slots(self._page_size):
                slots[row : row + len(page_slots)] = np.arange(page_slots.start, page_slots.stop)
                row += len(page_slots)
            if segment.logit_rows is LogitRows.LAST and count and not wants_all:
                logit_rows[num_logits] = row - 1
                num_logits += 1
        unused, absent = slice(row, None), slice(len(segments), None)
        token_ids[unused] = positions[unused] = 0
        slots[unused] = self._spare * self._page_size
        table[absent], past_lens[absent] = self._spare, 0
        row_starts[absent] = row
        if self.shape.is_decoding:  # padding sequences have a row each, too
            row_starts[absent] = range(row, self.shape.rows + 1)
        if wants_all:
            logit_rows[:] = range(self.shape.rows)
        else:
            logit_rows[num_logits:] = 0


class Captured(NamedTuple):
    """One bucket's graph with its inputs and its result, which each replay overwrites.

    `states` [rows, hidden] are the inputs of a stage after the first one.
    """

    inputs: GraphInputs
    states: Tensor | None
    graph: torch.cuda.CUDAGraph
    result: Tensor


class CudaGraphs:
    """Captured graphs of passes over one stage of a model and one store."""

    def __init__(self, model: Model, store: KVStore, stage: int = 0) -> None:
        self._model = model
        self._store = store
        self._stage = stage
        self._device = model.stages[stage].ops.device
        self._copy_from = model.stages[stage].copy_from
        self._has_logits = stage == len(model.stages) - 1 and model.has_head
        self._pages = min(pages_for(model.config.max_seq_len), store.num_pages)
        self._buckets = PROMPT_BUCKETS if model.num_ranks == 1 else LONG_BUCKETS
        # Graphs of first chunks are for torch's attention, which reads 16-bit keys and values. For
        # latent attention it also reads cached rows, of which those of padding are not set.
        shapes = (shape for shape in model.config.kv_shapes if shape is not None)
        has_latent = any(shape.is_shared for shape in shapes)
        self._has_fresh = store.kv_format is KVFormat.FP16 and not has_latent
        self._graphs: dict[Shape, Captured] = {}
        self._passes: Counter[Shape] = Counter()

    def next_ids(self, segments: Sequence[Segment]) -> Tensor | None:
        """Token input of the graph for these segments: int64 [n] on the device. None unless they
        form a decode pass whose graph has been captured, or if the host waits for other hosts in
        each pass."""
        if not self._model.has_head:
            return None
        shape = shape_of(segments, self._pages, self._buckets)
        if shape is None or not shape.is_decoding or shape not in self._graphs:
            return None
        return self._graphs[shape].inputs.batch.token_ids[: len(segments)]

    def lacks(self, segments: Sequence[Segment]) -> bool:
        """Whether these segments form a decode pass whose graph has not been captured yet."""
        shape = shape_of(segments, self._pages, self._buckets)
        return shape is not None and shape.is_decoding and shape not in self._graphs

    def run(
        self,
        segments: Sequence[Segment],
        x: Tensor | None = None,
        *,
        has_tokens: bool = False,
        is_decided: bool = False,
    ) -> Tensor | None:
        """Logits [n, vocab_size], or the states [R, hidden] after a stage that is not the last one,
        valid until the next run; None if the pass has no graph.

        `x` [R, hidden]: states after the stage before. With `has_tokens` the token ids are in the
        tensor that `next_ids` returned, or earlier work on the stream writes them there.
        `is_decided`: rank 0 has decided that the pass runs as a graph.
        """
        shape = shape_of(segments, self._pages, self._buckets, has_fresh=self._has_fresh)
        if shape is None:
            return None
        if self._store.grows:
            size = self._store.page_size
            self._store.grow(1 + max(one.last_written_page(size) for one in segments))
        if shape not in self._graphs:
            self._passes[shape] += 1
            is_early = self._passes[shape] < PASSES_BEFORE_CAPTURE
            is_rare = not shape.is_decoding and (is_early or len(self._graphs) >= MAX_GRAPHS)
            if shape.rows > PROMPT_BUCKETS[-1] and not is_rare and not is_decided:
                is_rare = _capturable_bytes(self._device) < LONG_PASS_BYTES
            if is_rare and not is_decided:
                return None
        with self._model.replaying(self._store, segments) as received:
            states = x if received is None else received
            result = self._replay(shape, segments, states, has_tokens=has_tokens)
            if self._has_logits:
                found = select_logits(result, shape, segments)
            else:
                found = result[: sum(len(one.token_ids) for one in segments)]
            return self._model.replayed(found, segments)

    def _replay(
        self, shape: Shape, segments: Sequence[Segment], x: Tensor | None, *, has_tokens: bool
    ) -> Tensor:
        """The result of the bucket's graph, which is captured first if there is none."""
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape, segments, x)
        inputs, states, graph, result = self._graphs[shape]
        inputs.fill(segments, has_tokens=has_tokens)
        if states is not None and x is not None:
            self._copy_from(x, states[: len(x)])
        with torch.cuda.device(self._device):
            graph.replay()
        return result

    def _capture(self, shape: Shape, segments: Sequence[Segment], x: Tensor | None) -> Captured:
        store, model = self._store, self._model
        model.reserve_positions(self._pages * store.page_size)
        spare_state = None if store.states is None else store.states.spare_slot
        inputs = GraphInputs(
            shape,
            self._pages,
            store.page_size,
            store.spare_page,
            self._device,
            spare_state=spare_state,
            num_buffers=max(HOST_BUFFERS, len(model.stages)),
        )
        inputs.fill(segments)
        if inputs.batch.states is not None and spare_state is not None:
            # The warm-up must not change the sequences' states.
            inputs.batch.states.fill_(spare_state)
        states = None
        if x is not None:
            states = torch.zeros(shape.rows, x.shape[1], dtype=x.dtype, device=self._device)
            self._copy_from(x, states[: len(x)])
        with torch.cuda.device(self._device):
            # Warm-up: kernels are loaded and workspaces allocated, which a capture does not allow.
            model.run_stage(self._stage, inputs.batch, store, states)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            pool = next((other.graph.pool() for other in self._graphs.values()), None)
            with capture(graph, self._device, pool):
                result = model.run_stage(self._stage, inputs.batch, store, states)
        return Captured(inputs, states, graph, result)


def _capturable_bytes(device: torch.device) -> int:
    """Free bytes that a capture may take. Torch returns none of its unused memory during one, and
    some are promised to caches that grow."""
    from exl_core.ops.backends.cuda.growing import promised_bytes

    return int(torch.cuda.mem_get_info(device)[0]) - promised_bytes(device)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all graphs of a device, as graphs that share memory have to share it.

    Its priority is higher than that of the stream that dequantizes, so that sums and products get
    multiprocessors first.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call] # torch's


class CollectionPause:
    """Context without Python's garbage collector, which several threads may enter at once.

    The collector may delete an unused graph, which frees memory of its device. A thread that
    captures must not do that: the driver refuses, and torch then ends the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._has_disabled = False

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if gc.isenabled():
                self._has_disabled = True
                gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0 and self._has_disabled:
                self._has_disabled = False
                gc.enable()


COLLECTION_PAUSE = CollectionPause()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """Context that captures work on `device`. Other threads may call the driver meanwhile.

    Torch's own choice is one stream for the whole process, on the device of the first capture. Work
    on another device would run once and not be captured.
    """
    stream = _capture_stream(device)
    with (
        COLLECTION_PAUSE,
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


def shape_of(
    segments: Sequence[Segment],
    pages: int,
    buckets: Sequence[int] = PROMPT_BUCKETS,
    *,
    has_fresh: bool = True,
) -> Shape | None:
    """Bucket of a pass whose sequences have at most `pages` pages each; None if no bucket fits.

    `buckets`: row counts of passes other than decode. `has_fresh`: whether passes that begin a
    sequence have buckets of their own.
    """
    counts = [len(one.token_ids) for one in segments]
    rows = sum(counts)
    is_fresh = has_fresh and len(counts) == 1 and rows >= MANY_QUERIES
    is_fresh = is_fresh and segments[0].past_len == 0
    if is_fresh and buckets[-1] < rows <= LONG_BUCKETS[-1]:
        long = LONG_BUCKETS[bisect_left(LONG_BUCKETS, rows)]
        buckets = LONG_BUCKETS if rows >= LEAST_FILLED * long else buckets
    is_small = 0 < rows <= buckets[-1] and len(counts) <= SEQUENCE_BUCKETS[-1]
    if not is_small or not all(_is_capturable(one, pages) for one in segments):
        return None
    is_decoding = max(counts) == min(counts) == 1
    if is_decoding and not any(one.logit_rows is LogitRows.NONE for one in segments):
        bucket = BUCKETS[bisect_left(BUCKETS, rows)]
        return Shape(bucket, bucket, bucket)
    bucket = buckets[bisect_left(buckets, rows)]
    sequences = SEQUENCE_BUCKETS[bisect_left(SEQUENCE_BUCKETS, len(counts))]
    sequences = min(sequences, bucket - 1)  # as many sequences as rows would mean decode
    wants_all = any(one.logit_rows is LogitRows.ALL for one in segments)
    logits = bucket if wants_all else sequences
    if len(counts) >= rows or logits > BUCKETS[-1]:
        return None
    return Shape(bucket, sequences, logits, is_fresh)


def _is_capturable(one: Segment, pages: int) -> bool:
    """The segment has neither adapters nor embedded vectors, and its pages fit the page table."""
    is_plain = not one.adapters and len(one.page_ids) <= pages
    return is_plain and max(one.token_ids, default=0) < EMBEDDED_FROM


def select_logits(logits: Tensor, shape: Shape, segments: Sequence[Segment]) -> Tensor:
    """Rows of the bucket's logits that the segments want, in order."""
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
