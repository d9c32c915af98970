"""Buckets of CUDA graphs: a pass padded to its bucket gives the logits of the unpadded pass."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.model import cuda_graphs
from exl_core.model.batch import Batch
from exl_core.model.cuda_graphs import (
    COLLECTION_PAUSE,
    LONG_BUCKETS,
    GraphInputs,
    Shape,
    capture,
    select_logits,
    shape_of,
)
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.session.load import load_model
from support.tiny_hybrids import tiny_kimi_linear, tiny_lfm2
from support.tiny_models import VOCAB_SIZE, save, tiny_gemma3, tiny_llama

ALL, LAST, NONE = LogitRows.ALL, LogitRows.LAST, LogitRows.NONE
PAGES = 12


def segment(rows: int, past: int, pages: tuple[int, ...], logit_rows: LogitRows) -> Segment:
    generator = torch.Generator().manual_seed(100 * rows + past + pages[0])
    ids = torch.randint(3, VOCAB_SIZE, (rows,), generator=generator).tolist()
    return Segment(tuple(ids), past, pages, logit_rows)


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_model(str(save(request.param(), tmp_path_factory.mktemp("model")))).model


def without_padding(inputs: GraphInputs, segments: list[Segment]) -> Batch:
    """The batch without its padding rows: CPU kernels reject rows that belong to no sequence."""
    batch, rows = inputs.batch, sum(len(one.token_ids) for one in segments)
    if inputs.shape.is_decoding:
        return batch
    assert batch.slots[rows:].eq(PAGES * PAGE_SIZE).all()
    assert batch.row_starts[len(segments) :].eq(rows).all()
    return replace(
        batch,
        token_ids=batch.token_ids[:rows],
        positions=batch.positions[:rows],
        slots=batch.slots[:rows],
        logit_rows=batch.logit_rows[batch.logit_rows < rows],
    )


PASSES = [
    ([segment(1, 40, (3,), LAST)], Shape(1, 1, 1)),
    ([segment(1, 9, (i,), LAST) for i in range(5)], Shape(6, 6, 6)),
    ([segment(1, 9, (i,), ALL) for i in range(3)], Shape(3, 3, 3)),
    ([segment(5, 30, (2,), ALL)], Shape(6, 1, 6)),
    ([segment(2, 250, (2, 5), ALL)], Shape(2, 1, 2)),
    ([segment(4, 30, (2,), ALL), segment(1, 7, (1,), LAST)], Shape(6, 4, 6)),
    ([segment(200, 60, (2, 4), LAST)], Shape(256, 1, 1)),
    ([segment(200, 60, (2, 4), NONE)], Shape(256, 1, 1)),
    ([segment(300, 0, (2, 4), LAST)], Shape(320, 1, 1, is_fresh=True)),
    ([segment(300, 60, (2, 4), LAST)], Shape(320, 1, 1)),
    ([segment(300, 0, (2, 4), NONE), segment(9, 0, (1,), LAST)], Shape(320, 4, 4)),
    (
        [segment(130, 0, (6,), NONE)] + [segment(1, 20, (i,), LAST) for i in range(4)],
        Shape(192, 16, 16),
    ),
    ([segment(3, 3, (1,), LAST), segment(1, 7, (2,), NONE)], Shape(4, 3, 3)),
]


@pytest.mark.parametrize(("segments", "shape"), PASSES)
def test_a_padded_pass_gives_the_same_logits_and_keys(
    model: Transformer, segments: list[Segment], shape: Shape
) -> None:
    assert shape_of(segments, PAGES) == shape
    plain, padded = (store_for(model, KVFormat.FP32, PAGES + 1) for _ in range(2))
    history = [segment(one.past_len, 0, one.page_ids, NONE) for one in segments if one.past_len > 0]
    for store in (plain, padded):
        if history:
            Runner(model, store).run(history)
    expected = Runner(model, plain).run(segments)
    inputs = GraphInputs(shape, PAGES, padded.page_size, PAGES, padded.device)
    for others in PASSES[0][0], segments:  # an earlier pass must leave nothing behind
        inputs.fill(others if len(others) <= shape.sequences else segments)
    logits = select_logits(
        model.forward(without_padding(inputs, segments), padded), shape, segments
    )
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for layer in range(model.config.num_layers):
        for one in segments:
            pages = list(one.page_ids)
            torch.testing.assert_close(
                padded.layer(layer).keys[pages],
                plain.layer(layer).keys[pages],
                rtol=1e-4,
                atol=1e-4,
            )


@pytest.mark.parametrize(
    "segments",
    [
        [segment(1025, 0, tuple(range(5)), LAST)],
        [segment(2048, 256, tuple(range(9)), LAST)],
        [segment(1919, 0, tuple(range(8)), LAST)],
        [segment(2049, 0, tuple(range(9)), LAST)],
        [segment(129, 0, (1,), ALL)],
        [segment(1, 0, (1,), LAST)] * 129,
        [segment(1, 0, (1,), LAST), segment(1, 0, (1,), NONE)],
        [segment(2, 0, tuple(range(PAGES + 1)), LAST)],
        [Segment((1 << 40,), 0, (1,), LAST)],
    ],
)
def test_no_bucket_for_large_or_unusual_passes(segments: list[Segment]) -> None:
    assert shape_of(segments, PAGES) is None


@pytest.mark.parametrize("rows", [1200, 1280, 1920, 2048])
def test_beginnings_of_long_prompts_have_buckets(rows: int) -> None:
    pages = tuple(range(-(-rows // PAGE_SIZE)))
    bucket = next(one for one in LONG_BUCKETS if one >= rows)
    for logit_rows in (LAST, NONE):
        shape = shape_of([segment(rows, 0, pages, logit_rows)], PAGES)
        assert shape == Shape(bucket, 1, 1, is_fresh=True)


def test_other_caches_have_no_buckets_for_beginnings() -> None:
    """Torch's attention does not take them."""
    pages = tuple(range(8))
    for rows, shape in ((300, Shape(320, 1, 1)), (2048, None)):
        assert shape_of([segment(rows, 0, pages, LAST)], PAGES, has_fresh=False) == shape


def test_decode_inputs_equal_freshly_written_ones(model: Transformer) -> None:
    """A decode pass rewrites only what changed; the result must equal that of fresh inputs."""
    store = store_for(model, KVFormat.FP16, PAGES)
    source = random.Random(4)
    shape = Shape(6, 6, 6)
    used = GraphInputs(shape, PAGES, store.page_size, PAGES, store.device)
    for _ in range(200):
        segments = []
        for _ in range(source.randint(1, 6)):
            pages = tuple(source.sample(range(PAGES), source.randint(1, 4)))
            past = source.randrange(PAGE_SIZE * (len(pages) - 1), PAGE_SIZE * len(pages))
            segments.append(segment(1, past, pages, source.choice((LAST, ALL))))
        fresh = GraphInputs(shape, PAGES, store.page_size, PAGES, store.device)
        used.fill(segments)
        fresh.fill(segments)
        for name in ("token_ids", "positions", "slots", "row_starts", "past_lens", "logit_rows"):
            assert torch.equal(getattr(used.batch, name), getattr(fresh.batch, name)), name
        for i, row in enumerate(used.batch.page_table.tolist()):
            pages = segments[i].page_ids if i < len(segments) else (PAGES,) * PAGES
            assert tuple(row[: len(pages)]) == pages


class NoStream:
    def __init__(self, device: torch.device, priority: int) -> None:
        assert priority < 0, "work that runs beside the graph comes second"
        self.device = device


def test_a_graph_is_captured_on_the_device_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own stream for captures belongs to the device that had the first one."""
    streams: list[NoStream] = []

    @contextmanager
    def begin(_: object, *, stream: NoStream, **options: object) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        assert not gc.isenabled()
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "graph", begin)
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    for device in devices:
        with capture(object(), device):  # type: ignore[arg-type]
            pass
    cuda_graphs._capture_stream.cache_clear()
    assert [stream.device for stream in streams] == devices
    assert streams[0] is streams[2]  # graphs that share memory share the stream


@pytest.mark.parametrize("build", [tiny_lfm2, tiny_kimi_linear])
def test_passes_of_hybrids_can_be_captured(build: Callable[[], Any], tmp_path: Path) -> None:
    model = load_model(str(save(build(), tmp_path / "model"))).model
    assert model.can_capture


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_the_garbage_collector_waits_for_the_last_capture() -> None:
    """It could delete another graph, which ends a process that captures."""
    assert gc.isenabled()
    lost = weakref.ref(Cycle())
    with COLLECTION_PAUSE:
        with COLLECTION_PAUSE:
            kept = [[number] for number in range(100_000)]  # enough for a collection
        assert not gc.isenabled()
        kept += [[number] for number in range(100_000)]
        assert lost() is not None
    assert gc.isenabled()
    gc.collect()
    assert lost() is None
    gc.disable()
    try:
        with COLLECTION_PAUSE:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
