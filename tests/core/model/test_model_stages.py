"""Models split over devices: the same bits as on one device, in every kind of pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.page_pool import PageCopy
from exl_core.formats.checkpoint import Checkpoint
from exl_core.model.build import build_weights
from exl_core.model.microbatch import (
    MICROBATCH_ROWS,
    MIN_SPLIT_SEQUENCES,
    decode_parts,
    microbatches,
)
from exl_core.model.runner import Runner, make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.stage import StageTable
from exl_core.model.transformer import Transformer
from exl_core.ops.backends.cpu.table import CpuTable
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.open import get_table
from exl_core.session.load import load_model
from support.mixed_model import CODES_CONFIG, CONFIG, mixed_model, random_tensors, write_tensors
from support.tiny_hybrids import tiny_lfm2
from support.tiny_models import save

SAMPLE_IDS = tuple(range(3, 50))


def split_model(folder: Path, backend: str, config: ModelConfig, *counts: int) -> Transformer:
    """The random model in stages of `counts` layers. Each stage has a table of its own."""
    checkpoint = Checkpoint(write_tensors(folder, random_tensors(config)), config)
    stages, first = [], 0
    for count in counts:
        stages.append(StageTable(range(first, first + count), get_table(backend, threads=1)))
        first += count
    assert first == config.num_layers
    last = stages[-1].ops
    weights = build_weights(config, checkpoint, last, threads=1, split=stages)
    return Transformer(config, weights, last, SAMPLE_IDS, split=stages)


def passes(model: Transformer, kv_format: KVFormat) -> Tensor:
    """Logits of a prompt in two chunks, a second sequence, decode of both, and a copied page."""
    store = store_for(model, kv_format, 6)
    runner = Runner(model, store)
    ids = tuple(int(one) for one in torch.randint(0, model.config.vocab_size, (300,)))

    def segment(first: int, last: int, pages: tuple[int, ...], rows: LogitRows) -> Segment:
        return Segment(ids[first:last], first, pages, rows)

    found = [
        runner.run([segment(0, 40, (0, 1), LogitRows.ALL)]),
        runner.run(
            [segment(40, 290, (0, 1), LogitRows.LAST), segment(0, 17, (2,), LogitRows.LAST)]
        ),
        runner.run(
            [segment(290, 291, (0, 1), LogitRows.LAST), segment(17, 18, (2,), LogitRows.LAST)]
        ),
        runner.run([segment(18, 19, (3,), LogitRows.LAST)], [PageCopy(2, 3, 18)]),
    ]
    return torch.cat([one.clone() for one in found])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("counts", [(1, 3), (2, 1, 1), (1, 1, 1, 1)])
def test_stages_compute_the_bits_of_one_device(
    backend: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    assert CONFIG.num_layers == 4
    whole, _ = mixed_model(tmp_path, backend)
    torch.manual_seed(5)
    expected = passes(whole, KVFormat.FP16)
    torch.manual_seed(5)
    found = passes(split_model(tmp_path, backend, CONFIG, *counts), KVFormat.FP16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kv_format", [KVFormat.Q4, KVFormat.Q8])
def test_key_smoothing_is_measured_through_all_stages(kv_format: KVFormat, tmp_path: Path) -> None:
    whole, _ = mixed_model(tmp_path, "cpu", CODES_CONFIG, SAMPLE_IDS)
    torch.manual_seed(6)
    expected = passes(whole, kv_format)
    torch.manual_seed(6)
    found = passes(split_model(tmp_path, "cpu", CODES_CONFIG, 1, 1), kv_format)
    assert torch.equal(found, expected)


def test_a_tied_head_is_packed_for_the_last_stage(tmp_path: Path) -> None:
    config = replace(CONFIG, has_tied_embeddings=True)
    whole, _ = mixed_model(tmp_path, "cpu", config)
    split = split_model(tmp_path, "cpu", config, 2, 2)
    segments = (Segment((1, 2, 3), 0, (0,), LogitRows.ALL),)
    expected, found = (
        model.forward(make_batch(segments, PAGE_SIZE), store_for(model, KVFormat.FP32, 1))
        for model in (whole, split)
    )
    assert torch.equal(found, expected)
    assert split.weights_bytes > whole.weights_bytes, "embedding and head are two matrices"


def test_the_cache_of_a_layer_is_on_the_device_of_its_stage(tmp_path: Path) -> None:
    split = split_model(tmp_path, "cpu", CONFIG, 1, 3)
    assert split.ops_of(0) is split.embedding_ops is split.stages[0].ops
    assert split.ops_of(3) is split.ops is split.stages[1].ops
    store = store_for(split, KVFormat.FP16, 2)
    assert store.devices == tuple(split.ops_of(layer).device for layer in range(4))


def test_every_stage_begins_its_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage without attention too: its products may use memory that a graph has used."""
    called: list[str] = []
    multiply = CpuTable.linear_add_

    def counted(table: CpuTable, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        called.append("product")
        return multiply(table, x, w, residual)

    monkeypatch.setattr(CpuTable, "linear_add_", counted)
    monkeypatch.setattr(CpuTable, "begin_pass", lambda _: called.append("begin"))
    folder = save(tiny_lfm2(), tmp_path / "lfm2")  # two short convolutions first
    split = load_model(folder, device="cpu", threads=1, split="cpu=2,cpu=3").model
    store, rows = store_for(split, KVFormat.FP16, 1), LogitRows.LAST
    segment = Segment(SAMPLE_IDS, 0, (0,), logit_rows=rows, state_slot=0)
    called.clear()
    split.forward(make_batch([segment]), store)
    products = [index for index, name in enumerate(called) if name == "product"]
    begins = [index for index, name in enumerate(called) if name == "begin"]
    assert len(begins) == 2
    assert begins[0] == 0
    assert products[0] < begins[1] < products[-1]


segment_lists = st.lists(
    st.tuples(st.integers(1, 1500), st.integers(0, 700), st.sampled_from(LogitRows)),
    min_size=1,
    max_size=5,
)


@given(segment_lists, st.integers(2, 4), st.booleans())
def test_microbatches_have_the_rows_and_logits_of_the_pass(
    shapes: list[tuple[int, int, LogitRows]], stages: int, splits_decode: bool
) -> None:
    segments = []
    for number, (count, past, rows) in enumerate(shapes):
        pages = tuple(range(100 * number, 100 * number + pages_for(past + count)))
        segments.append(Segment(tuple(range(count)), past, pages, rows))
    parts = microbatches(segments, stages, splits_decode=splits_decode)
    whole, cut = make_batch(segments), [make_batch(part) for part in parts]
    for name in ("token_ids", "positions", "slots"):
        joined = torch.cat([getattr(one, name) for one in cut])
        assert torch.equal(joined, getattr(whole, name)), name
    first, wanted = 0, []
    for one in cut:
        assert len(one.token_ids) <= MICROBATCH_ROWS
        wanted.append(one.logit_rows + first)
        first += len(one.token_ids)
    assert torch.equal(torch.cat(wanted), whole.logit_rows)


def test_decode_is_divided_only_where_stages_are_gpus() -> None:
    count = MIN_SPLIT_SEQUENCES + 1
    half = count // 2
    decode = [Segment((1,), 5, (i,), LogitRows.LAST) for i in range(count)]
    assert [len(one) for one in microbatches(decode, 2, splits_decode=True)] == [half + 1, half]
    assert [len(one) for one in microbatches(decode, 2, splits_decode=False)] == [count]
    assert [len(one) for one in microbatches(decode[2:], 2, splits_decode=True)] == [count - 2]


@pytest.mark.parametrize(
    ("count", "stages", "sizes"),
    [
        (1, 2, [1]),
        (15, 2, [15]),
        (16, 2, [8, 8]),
        (17, 4, [9, 8]),
        (31, 4, [11, 11, 9]),
        (32, 1, [32]),
        (32, 4, [8] * 4),
        (200, 2, [100, 100]),
    ],
)
def test_parts_of_decode_have_eight_sequences(count: int, stages: int, sizes: list[int]) -> None:
    decode = [Segment((i,), i, (i,), LogitRows.LAST) for i in range(count)]
    parts = decode_parts(decode, stages)
    assert [len(part) for part in parts] == sizes
    assert [one for part in parts for one in part] == decode
    prompt = Segment((1, 2), 0, (count,), LogitRows.LAST)
    assert decode_parts([*decode, prompt], stages) == [(*decode, prompt)]


def test_a_long_prompt_in_microbatches_gives_the_bits_of_its_chunks(tmp_path: Path) -> None:
    split, (whole, _) = split_model(tmp_path, "cpu", CONFIG, 2, 2), mixed_model(tmp_path, "cpu")
    ids = tuple(int(one) for one in torch.randint(0, CONFIG.vocab_size, (900,)))
    prompt = Segment(ids, 0, tuple(range(4)), LogitRows.LAST)
    found = Runner(split, store_for(split, KVFormat.FP16, 4)).run([prompt])
    runner = Runner(whole, store_for(whole, KVFormat.FP16, 4))
    for chunk in microbatches([prompt], 2, splits_decode=False):
        expected = runner.run(chunk)
    assert torch.equal(found, expected)
