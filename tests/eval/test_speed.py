"""`exl bench`: the passes that it runs, the bytes that it counts, and the derived figures."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.batch import Batch
from exl_core.model.runner import Runner
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.stage import StageTable
from exl_core.model.transformer import Transformer
from exl_core.ops.table import OpTable
from exl_core.session.load import LoadedModel, load_model
from exl_eval import speed, workload
from exl_eval.machine import peak_memory_bytes, read_bandwidth
from exl_eval.result import SpeedResult, SpeedRun, Spread
from exl_eval.speed import SpeedOptions, check_options, measure_speed
from support import tiny_models

BANDWIDTH = 1e9


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Model with separate head and embedding, and a context of 600 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    return load_model(
        str(tiny_models.save(tiny_models.tiny_llama(max_position_embeddings=600), folder))
    )


@pytest.fixture
def batches(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Records every batch that the model runs, and sets the memory bandwidth to BANDWIDTH."""
    seen: list[Batch] = []
    forward = type(tiny.model).forward

    def record(model: Transformer, batch: Batch, store: KVStore) -> Tensor:
        seen.append(batch)
        return forward(model, batch, store)

    monkeypatch.setattr(type(tiny.model), "forward", record)
    monkeypatch.setattr(speed, "read_bandwidth", lambda _threads: BANDWIDTH)
    return seen


class OtherDevice:
    """A CPU op table that names another device."""

    device = torch.device("meta")

    def __init__(self, ops: OpTable) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


def measure(loaded: LoadedModel, **options: object) -> SpeedResult:
    return measure_speed(loaded, SpeedOptions(**options), start_memory_bytes=1)  # type: ignore[arg-type]


def test_each_repetition_runs_the_requested_work(tiny: LoadedModel, batches: list[Batch]) -> None:
    measure(tiny, prefill=(530,), decode=5, batch=(3,), repeat=2)

    fill, decode, prefill = batches[0], batches[1 : 1 + 3 * 5], batches[1 + 3 * 5 :]
    assert (fill.past_lens.tolist(), len(fill.token_ids)) == ([0], 1)  # the others are copies
    for number, batch in enumerate(decode):
        step = 1 + number % 5  # one unmeasured and two measured repetitions
        assert batch.past_lens.tolist() == [step] * 3
        assert len(batch.logit_rows) == len(batch.token_ids) == 3
        assert len(set(batch.slots.tolist())) == 3
    assert [len(batch.token_ids) for batch in prefill] == [512, 512, 512, 54] * 3
    for first in range(0, 12, 4):
        run = prefill[first : first + 4]
        assert sum(len(batch.logit_rows) for batch in run) == 3  # the last token of each prompt
        assert len(torch.cat([batch.slots for batch in run]).unique()) == 3 * 530


def test_prefill_ends_with_the_logits_of_generation(
    tiny: LoadedModel, batches: list[Batch]
) -> None:
    measure(tiny, prefill=(PAGE_SIZE + 3,), decode=1, batch=(1,), repeat=1)
    ids = batches[-1].token_ids.tolist()
    assert ids == [(100 + i) % 300 for i in range(PAGE_SIZE + 3)]
    assert batches[-1].logit_rows.tolist() == [len(ids) - 1]
    decoded = batches[: 1 + 2 * 1]  # filling the cache, then one step per repetition
    assert [batch.token_ids.tolist() for batch in decoded] == [ids[:1], ids[1:2], ids[1:2]]


@given(
    prompt=st.integers(1, 900),
    batch=st.integers(1, 5),
    pass_rows=st.integers(1, 300),
)
def test_passes_cover_every_prompt_once_and_in_order(
    prompt: int, batch: int, pass_rows: int
) -> None:
    pages = [tuple(range(owner * 4, owner * 4 + 4)) for owner in range(batch)]
    tokens = workload.fixed_tokens(prompt, 1000)
    passes = list(workload.prefill_passes(tokens, pages, pass_rows))

    assert all(sum(len(s.token_ids) for s in segments) == pass_rows for segments in passes[:-1])
    assert 0 < sum(len(s.token_ids) for s in passes[-1]) <= pass_rows
    for owner in range(batch):
        mine = [s for segments in passes for s in segments if s.page_ids[0] == owner * 4]
        assert sum((s.token_ids for s in mine), ()) == tokens
        starts = [sum(len(s.token_ids) for s in mine[:i]) for i in range(len(mine))]
        assert [s.past_len for s in mine] == starts
        assert [s.logit_rows for s in mine] == [LogitRows.NONE] * (len(mine) - 1) + [LogitRows.LAST]
        for s in mine:
            assert len(s.page_ids) * PAGE_SIZE >= s.past_len + len(s.token_ids)
            assert s.page_ids == pages[owner][: len(s.page_ids)]


def test_figures_of_a_run_are_consistent(tiny: LoadedModel, batches: list[Batch]) -> None:
    result = measure(tiny, prefill=(4, 8), decode=3, batch=(1, 2), repeat=1)
    assert [(run.prompt_tokens, run.batch) for run in result.runs] == [
        (4, 1),
        (4, 2),
        (8, 1),
        (8, 2),
    ]
    for run in result.runs:
        assert run.prefill.lowest <= run.prefill.median <= run.prefill.highest
        assert run.floor_tok_s == pytest.approx(BANDWIDTH / run.bytes_per_token)
        assert run.floor_share == pytest.approx(run.decode.median / run.floor_tok_s)
    one, two, *longer = result.runs
    cache_bytes = one.bytes_per_token - result.decode_weight_bytes
    assert cache_bytes == 3 * 2 * 2 * 20 * 2 * (2 + 3 + 4) // 3  # layers, heads, k and v, D, fp16
    assert two.bytes_per_token == result.decode_weight_bytes / 2 + cache_bytes
    assert [run.decode for run in longer] == [one.decode, two.decode]
    assert result.peak_memory_bytes > 100e6
    assert (result.start_memory_bytes, result.threads) == (1, tiny.model.ops.threads)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_embedding_counts_only_if_it_is_the_head(is_tied: bool, tmp_path: Path) -> None:
    model = tiny_models.tiny_llama(tie_word_embeddings=is_tied)
    loaded = load_model(str(tiny_models.save(model, tmp_path)))
    table_bytes = 300 * 72 * 4
    untouched = 0 if is_tied else table_bytes
    counted = loaded.model.decode_weight_bytes
    assert loaded.weights_bytes - counted == pytest.approx(untouched, rel=0.2)  # panel padding
    assert (counted == loaded.weights_bytes) == is_tied


def test_local_layers_read_no_more_than_their_window(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_models.save(tiny_models.tiny_gemma3(), tmp_path)))
    options = SpeedOptions(decode=99, kv_format=KVFormat.FP32)
    seen = [step + 2 for step in range(99)]
    positions = 2 * sum(seen) + 2 * sum(min(count, 40) for count in seen)
    assert speed.kv_read_bytes(loaded.config, options) == positions * 2 * 2 * 20 * 4 // 99


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prefill": (601,)}, "--prefill of 1 to 600"),
        ({"prefill": (1, 0)}, "--prefill of 1 to 600"),
        ({"decode": 600}, "--decode of 1 to 599"),
        ({"decode": 600 - 256, "depth": 257}, "--decode of 1 to 343"),
        ({"depth": 600}, "--depth of 1 to 599"),
        ({"pass_rows": 0}, "--chunk"),
        ({"kv_format": KVFormat.Q8}, "--cache-type fp16 or fp8"),
        ({"decode": 0}, "--decode of 1 to 599"),
        ({"batch": (1, 0)}, "--batch"),
        ({"repeat": 0}, "--repeat"),
        ({"batch": ()}, "a batch size"),
    ],
)
def test_unsuitable_options_are_refused(
    tiny: LoadedModel, options: dict[str, object], expected: str
) -> None:
    with pytest.raises(RequestError, match=expected):
        check_options(SpeedOptions(**options), tiny.config)  # type: ignore[arg-type]


def test_lengths_up_to_the_context_are_accepted(tiny: LoadedModel) -> None:
    check_options(SpeedOptions(prefill=(600,), decode=599), tiny.config)


def test_each_step_is_fed_the_tokens_of_the_previous_step(
    tiny: LoadedModel, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[list[int]] = []
    run = Runner.run

    def record(self: Runner, segments: Sequence[Segment], *rest: Any) -> Tensor:
        logits = run(self, segments, *rest)
        if len(segments) == 2 and segments[0].past_len >= 40:
            fed = [token_id for one in segments for token_id in one.token_ids]
            assert fed == (sampled[-1] if segments[0].past_len > 40 else [140, 141])
            sampled.append(logits.argmax(-1).tolist())
        return logits

    monkeypatch.setattr(Runner, "run", record)
    measure(tiny, prefill=(1,), decode=8, batch=(2,), repeat=1, depth=40)
    assert len(sampled) == 2 * 8
    assert sampled[:8] == sampled[8:]
    decoded = [batch for batch in batches if len(batch.token_ids) == 2]
    assert [batch.past_lens.tolist() for batch in decoded[:8]] == [[n, n] for n in range(40, 48)]


def test_depth_counts_as_cache_reads(tiny: LoadedModel, batches: list[Batch]) -> None:
    result = measure(tiny, prefill=(4,), decode=2, batch=(1,), repeat=1, depth=300)
    (run,) = result.runs
    positions = (301 + 302) / 2
    assert run.bytes_per_token - result.decode_weight_bytes == 3 * 2 * 2 * 20 * 2 * positions
    assert (result.depth, result.device, run.launches) == (300, "cpu", None)


def test_progress_counts_every_repetition(tiny: LoadedModel, batches: list[Batch]) -> None:
    calls: list[tuple[int, int, str]] = []
    measure_speed(
        tiny,
        SpeedOptions(prefill=(2, 3), decode=1, batch=(1, 2), repeat=2),
        start_memory_bytes=0,
        on_measured=lambda *call: calls.append(call),
    )
    assert [(done, total) for done, total, _ in calls] == [(i, 18) for i in range(18)]
    assert "prefill of 3 tokens, batch 2" in calls[-1][2]


def test_figures_of_a_single_run_are_also_at_the_top_level() -> None:
    rate = Spread(2.0, 1.0, 3.0)
    run = SpeedRun(512, 128, 4, rate, rate, 50.5, 100.0, 0.02)
    facts = ("m", "cpu", "avx2", 2, "fp16", 1, False, 3, 10, 10, 1e9, 0.5, 100, 200, None, None)
    single, grid = SpeedResult(*facts, (run,)).as_dict(), SpeedResult(*facts, (run, run)).as_dict()
    assert single["runs"] == [run.as_dict()]
    assert (single["decode_tok_s"], single["decode_tok_s_per_sequence"]) == (2.0, 0.5)
    assert (single["prefill_tok_s_min"], single["prefill_tok_s_max"]) == (1.0, 3.0)
    assert "decode_tok_s" not in grid
    assert grid["runs"] == [run.as_dict()] * 2
    assert grid["peak_memory_bytes"] == single["peak_memory_bytes"] == 200


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_read_bandwidth_is_plausible(threads: int) -> None:
    found = read_bandwidth(threads, seconds=0.02, buffer_bytes=16 * 2**20)
    assert 1e8 < found < 1e13


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    counts = Path("/proc/self/statm")  # in pages: size, resident, ...
    return int(counts.read_text().split()[1]) * PAGESIZE if counts.is_file() else 0


def test_peak_memory_grows_and_never_falls() -> None:
    before = peak_memory_bytes()
    missing = before - resident_bytes() + 2**27  # enough to exceed the earlier peak
    used = torch.ones(missing // 4)
    during = peak_memory_bytes()
    assert during - before > 2**26 / 2
    del used
    assert peak_memory_bytes() > during - 2**22  # the kernel sums its per-core counters late


def test_the_floor_of_a_split_model_adds_the_times_of_its_stages(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, layers = tiny.model, tiny.config.num_layers
    tables = [StageTable(range(1), whole.ops), StageTable(range(1, layers), OtherDevice(whole.ops))]
    weights = whole._held_weights
    assert weights is not None
    split = Transformer(tiny.config, weights, whole.ops, split=tables)
    sizes = split.stage_pass_bytes(1)
    assert sum(sizes) == whole.pass_weight_bytes(1)
    assert sizes[0] == weights.blocks[0].size_bytes

    rates = {"cpu": BANDWIDTH, "meta": BANDWIDTH / 10}
    monkeypatch.setattr(speed, "memory_bandwidth", lambda ops: rates[ops.device.type])
    options = SpeedOptions(decode=3)
    first, second = (
        speed.kv_read_bytes(tiny.config, options, tiny.config.layers[part])
        for part in (slice(1), slice(1, None))
    )
    floor = speed.StepFloor(split, options)
    expected = (sizes[0] + 4 * first) / BANDWIDTH + 10 * (sizes[1] + 4 * second) / BANDWIDTH
    assert floor.step_seconds(4) == pytest.approx(expected)
    assert BANDWIDTH / 10 < floor.bytes_per_s < BANDWIDTH


def test_sequences_share_their_prompt_and_differ_in_their_next_token(tiny: LoadedModel) -> None:
    work = workload.Workload(tiny.model, KVFormat.FP32, tokens=41, batch=3)
    assert work.fill(40) == [140, 141, 142]
    first, second, third = work.step([140, 140, 141], 40)
    assert first == second != third
