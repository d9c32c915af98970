"""Runs the model on a batch plan: lays the segments out as tensors and computes their logits.

Knows the tensors that the model needs. Knows neither requests, nor which sequence owns a page, nor
sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.cache.page_pool import PageCopy
from exl_core.cache.state import StateCopy
from exl_core.cache.state_store import StateStore
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.batch import AdapterRows, Batch, EmbeddedRows
from exl_core.model.cuda_graphs import CudaGraphs
from exl_core.model.embedded import EMBEDDED_FROM
from exl_core.model.microbatch import decode_parts, microbatches
from exl_core.model.protocol import Model
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.open import device_failures
from exl_core.ops.sampling import NextStep, PartLogits
from exl_core.option_types import check_option


def store_for(
    model: Model,
    kv_format: KVFormat,
    num_pages: int,
    *,
    grows: bool = False,
    num_states: int = 1,
    keeps_final: bool = False,
) -> KVStore:
    """A store for the keys and values of `model`, each layer's on the device of the layer.

    `num_states`: slots for the states of sequences, if the model has recurrent layers.
    `keeps_final`: the store has the states after the final norm too.
    """
    check_option("kv_format", kv_format, KVFormat, "cache")
    stages = model.stages
    devices = tuple(stage.ops.device for stage in stages for _ in stage.layers)
    shapes, has_states = model.config.state_shapes, model.config.state_bytes > 0
    states = StateStore(shapes, num_states, devices) if has_states else None
    return KVStore(
        kv_format,
        model.config.kv_shapes,
        num_pages,
        device=devices,
        grows=grows,
        states=states,
        final_size=model.config.hidden_size if keeps_final else 0,
    )


def make_batch(segments: Sequence[Segment], page_size: int = PAGE_SIZE) -> Batch:
    """Flatten the segments, in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_starts = [0]
    logit_rows: list[int] = []
    adapters: list[AdapterRows] = []
    for segment in segments:
        first_row, count = len(token_ids), len(segment.token_ids)
        token_ids += segment.token_ids
        positions += range(segment.past_len, segment.past_len + count)
        for page_slots in segment.slots(page_size):
            slots += page_slots
        row_starts.append(first_row + count)
        if segment.logit_rows is LogitRows.ALL:
            logit_rows += range(first_row, first_row + count)
        elif segment.logit_rows is LogitRows.LAST:
            logit_rows.append(first_row + count - 1)
        if segment.adapters:
            _add_adapters(adapters, segment, first_row)
    ids = _integers(token_ids)  # [rows]
    embedded = _take_embedded(segments, ids) if max(token_ids) >= EMBEDDED_FROM else None
    longest = max(len(segment.page_ids) for segment in segments)
    tables = [
        list(segment.page_ids) + [0] * (longest - len(segment.page_ids)) for segment in segments
    ]
    return Batch(
        token_ids=ids,
        positions=_integers(positions),  # [rows]
        row_starts=torch.tensor(row_starts, dtype=torch.int32),  # [seqs + 1]
        past_lens=torch.tensor([s.past_len for s in segments], dtype=torch.int32),  # [seqs]
        page_table=torch.tensor(tables, dtype=torch.int32),  # [seqs, pages]
        slots=_integers(slots),  # [rows]
        logit_rows=_integers(logit_rows),  # [n]
        adapters=tuple(adapters),
        embedded=embedded,
        states=_state_slots(segments),  # [seqs]
    )


def _state_slots(segments: Sequence[Segment]) -> Tensor | None:
    """Slots of the sequences' states; None unless all segments have one."""
    slots = [segment.state_slot for segment in segments if segment.state_slot is not None]
    return _integers(slots) if len(slots) == len(segments) else None


def _integers(numbers: Sequence[int]) -> Tensor:
    """int64 tensor. For thousands of numbers, `torch.tensor` takes three times as long."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _add_adapters(adapters: list[AdapterRows], segment: Segment, first_row: int) -> None:
    """Appends the segment's rows. Adjacent segments with the same adapters become one range, which
    gives fewer and larger matrix products."""
    uses = tuple(use for use in segment.adapters if use.scale != 0.0)
    last_row = first_row + len(segment.token_ids)
    if adapters and adapters[-1].last_row == first_row and adapters[-1].uses == uses:
        first_row = adapters.pop().first_row
    if uses:
        adapters.append(AdapterRows(first_row, last_row, uses))


def _take_embedded(segments: Sequence[Segment], ids: Tensor) -> EmbeddedRows:
    """Vectors of the embedded ids in `ids` [rows]. Replaces those ids by token 0, in place."""
    rows: list[Tensor] = []
    vectors: list[Tensor] = []
    first_row = 0
    for segment in segments:
        part = ids[first_row : first_row + len(segment.token_ids)]
        for span in segment.embeddings:
            index = part - span.first_id
            found = ((index >= 0) & (index < len(span.vectors))).nonzero().view(-1)
            rows.append(found + first_row)
            vectors.append(span.vectors.index_select(0, index[found]))
            part[found] = 0
        if int(part.max()) >= EMBEDDED_FROM:
            raise RequestError(
                f"id {int(part.max())} stands for a vector that did not come with it",
                next_step="Pass the embedded span along with the ids that it has.",
            )
        first_row += len(segment.token_ids)
    return EmbeddedRows(torch.cat(rows), torch.cat(vectors))


class NextPart(NamedTuple):
    """Sequences of a pass that run through the stages together, one token each.

    `token_ids` [n] on the device that samples receive the tokens. If a pass has several parts,
    `logits` is where this part's are kept, and `stream` is theirs (`PartLogits`).
    """

    segments: Sequence[Segment]
    token_ids: Tensor
    logits: Tensor | None = None
    stream: torch.cuda.Stream | None = None
    first_row: int = 0


class NextPass(NamedTuple):
    """A pass that can be launched before the host knows its tokens."""

    token_ids: Tensor  # of all parts
    parts: Sequence[NextPart]
    logits: Tensor | None = None  # [n, vocab_size], of all parts if there are several

    def logits_of(self, begun: Sequence[PartLogits]) -> Tensor:
        """Logits [n, vocab_size] of the pass. `begun`: those of each part, from `run_on`."""
        return begun[0].logits if self.logits is None else self.logits

    def step(self, launch: Callable[[NextPart], None]) -> NextStep:
        """Continuation of sampling that launches each part."""
        steps = tuple(NextStep(part.token_ids, partial(launch, part)) for part in self.parts)
        if len(steps) == 1:
            return steps[0]

        def launch_all() -> None:
            for step in steps:
                step.launch()

        return NextStep(self.token_ids, launch_all, steps)


def divided(
    parts: Sequence[Sequence[Segment]],
    token_ids: Tensor,
    logits: Tensor,
    streams: Sequence[torch.cuda.Stream | None],
) -> list[NextPart]:
    """The parts of a pass with their rows of its tokens [n] and of its logits [n, vocab_size]."""
    found, first = [], 0
    for part, stream in zip(parts, streams, strict=False):
        rows = slice(first, first + len(part))
        found.append(NextPart(part, token_ids[rows], logits[rows], stream, first))
        first += len(part)
    return found


class Runner:
    """A model together with the store that holds its pages."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self.model = model
        self.store = store
        self._graphs = tuple(
            CudaGraphs(model, store, index)
            if stage.ops.device.type == "cuda" and model.can_capture
            else None
            for index, stage in enumerate(model.stages)
        )
        # Several stages: the sampled tokens, int64 on the device of the last stage, and a stream of
        # that device for each part of a pass.
        self._sampled_ids: Tensor | None = None
        self._part_streams: list[torch.cuda.Stream] = []
        self._pass_stream: torch.cuda.Stream | None = None  # of that device, for passes

    @torch.inference_mode()
    def run(
        self,
        segments: Sequence[Segment],
        copies: Sequence[PageCopy] = (),
        out: Tensor | None = None,
        state_copies: Sequence[StateCopy] = (),
    ) -> Tensor:
        """Logits of the rows that the segments want, in order: [n, vocab_size], valid until the
        next run.

        `copies` between pages and `state_copies` are made first. `out`, float32 [n or more,
        vocab_size], receives the logits where the backend supports it. On a CPU, freshly allocated
        memory costs about as much time as computing the logits.
        """
        with device_failures(self.store.device, f"a pass of {len(segments)} sequences"):
            self.model.check_loaded()
            self.store.copy_pages(copies)
            self.store.copy_states(state_copies)
            if len(self._graphs) > 1:
                return self._run_split(segments, out)
            graphs = self._graphs[0]
            logits = None if graphs is None else graphs.run(segments)
            if logits is not None:
                return logits
            batch = make_batch(segments, self.store.page_size)
            return self.model.forward(replace(batch, logits=out), self.store)

    def _run_split(self, segments: Sequence[Segment], out: Tensor | None) -> Tensor:
        """A pass through several stages, each with its own graphs."""
        parts = self._parts(segments)
        if len(parts) == 1:
            return self._run_stages(segments, out)
        # A graph's result is overwritten by its next replay.
        return torch.cat([self._run_stages(part, None).clone() for part in parts])

    def _parts(self, segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
        """Parts of a pass whose tokens the host knows."""
        parts = microbatches(segments, len(self._graphs), splits_decode=self.has_graphs)
        if len(parts) > 1 or not self.has_graphs:
            return parts
        # Later passes are launched in these parts (`next_pass`), which need their graphs.
        later = decode_parts(segments, len(self._graphs))
        are_missing = (
            one is not None and one.lacks(part) for one in self._graphs for part in later
        )
        return later if any(are_missing) else parts

    def _run_stages(
        self, segments: Sequence[Segment], out: Tensor | None, *, has_tokens: bool = False
    ) -> Tensor:
        batch: Batch | None = None
        x: Tensor | None = None
        for index, graphs in enumerate(self._graphs):
            found = None if graphs is None else graphs.run(segments, x, has_tokens=has_tokens)
            if found is None and has_tokens:
                raise AssertionError("run_on: a stage has no graph of such a pass")
            if found is None:
                if batch is None:
                    batch = replace(make_batch(segments, self.store.page_size), logits=out)
                found = self.model.run_stage(index, batch, self.store, x)
            x = found
        assert x is not None, "a model has at least one stage"
        return x

    @property
    def has_graphs(self) -> bool:
        """Whether passes run as captured CUDA graphs, one per stage, which async scheduling
        requires."""
        return all(graphs is not None for graphs in self._graphs)

    def next_pass(self, segments: Sequence[Segment]) -> NextPass | None:
        """The pass over these segments, of one token each, for `run_on`. None if a graph is missing
        for it. Raises OutOfMemoryError without memory for the logits of its parts."""
        if len(self._graphs) == 1:
            graphs = self._graphs[0]
            place = None if graphs is None else graphs.next_ids(segments)
            return None if place is None else NextPass(place, [NextPart(segments, place)])
        parts = decode_parts(segments, len(self._graphs))
        if not all(self._are_captured(part) for part in parts):
            return None
        device = self.model.stages[-1].ops.device
        if self._sampled_ids is None or len(self._sampled_ids) < len(segments):
            self._sampled_ids = torch.zeros(len(segments), dtype=torch.int64, device=device)
        self._pass_stream = torch.cuda.current_stream(device)
        while len(self._part_streams) < len(parts):
            # Before the kernels of the graphs: all GPUs wait for the sampled tokens.
            self._part_streams.append(torch.cuda.Stream(device, priority=-2))  # type: ignore[no-untyped-call]
        token_ids = self._sampled_ids[: len(segments)]
        if len(parts) == 1:
            return NextPass(token_ids, [NextPart(parts[0], token_ids)])
        with device_failures(device, "keeping the logits of a pass"):
            logits = torch.empty(len(segments), self.model.config.vocab_size, device=device)
        return NextPass(token_ids, divided(parts, token_ids, logits, self._part_streams), logits)

    def _are_captured(self, segments: Sequence[Segment]) -> bool:
        return all(
            graphs is not None and graphs.next_ids(segments) is not None for graphs in self._graphs
        )

    @torch.inference_mode()
    def run_on(self, part: NextPart) -> PartLogits:
        """Launches a part of the result of `next_pass`.

        Work queued earlier on the current stream of the device that samples writes the tokens to
        `part.token_ids`. The host does not synchronize, and the token ids in the segments are
        ignored.
        """
        with device_failures(self.store.device, f"a pass of {len(part.segments)} sequences"):
            if len(self._graphs) == 1:
                return PartLogits(self._run_stages(part.segments, None, has_tokens=True))
            assert self._pass_stream is not None, "next_pass made the part"
            self._bring_ids(part, self._pass_stream)
            with torch.cuda.stream(self._pass_stream):
                logits = self._run_stages(part.segments, None, has_tokens=True)
                if part.logits is not None:  # the next part's replay overwrites the result
                    logits = part.logits.copy_(logits)
                if part.stream is not None:
                    part.stream.wait_stream(self._pass_stream)
            return PartLogits(logits, part.stream, part.first_row)

    def _bring_ids(self, part: NextPart, passes: torch.cuda.Stream) -> None:
        """Queues the copy of the sampled tokens to the first of several stages, which has the
        embedding and is the only one that reads them. `passes`: stream of the last stage."""
        first, stage = self._graphs[0], self.model.stages[0]
        target = None if first is None else first.next_ids(part.segments)
        if target is None:
            raise AssertionError("run_on: the first stage has no graph of such a pass")
        if stage.ops.device != passes.device:
            stage.copy_from(part.token_ids, target)
            return
        passes.wait_stream(torch.cuda.current_stream(passes.device))
        with torch.cuda.stream(passes):
            target.copy_(part.token_ids)
