"""Several hosts with GPUs, here all on one machine: layers divided among the hosts, matrices among
the GPUs of a host.

Hosts share GPUs if there are too few of them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.errors import DeviceError
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, load_model
from support.driving import ask, run_all, submit
from support.host_models import gpus_of_hosts, logits_of_passes, on_hosts
from support.launched_jobs import (
    PROMPT,
    START_S,
    TOKENS,
    complete,
    is_free,
    job,
    nodes,
    requests_to,
)
from support.quantized_models import SIZES, quantized_llama
from support.thread_ranks import assert_alike, logits_of, mean_kl
from support.tiny_hybrids import tiny_lfm2, tiny_qwen35
from support.tiny_models import VOCAB_SIZE, save, tiny_gemma3, tiny_llama, tiny_mixtral

SERVE = ("serve-lite", "--port", "0", "--device", "cuda", "--threads", "2")
END_S = 20.0
PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5] * 30, [11, 12], [200, 3, 4, 250] * 8)
QUANTIZED = ("exl2", "gptq", "exl3")
HYBRIDS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: tiny_lfm2(hidden_size=192, head_dim=32, block_multiple_of=32),
    "qwen3.5": lambda: tiny_qwen35(
        hidden_size=96, head_dim=32, intermediate_size=160, linear_value_head_dim=32
    ),
}


def needs(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


pytestmark = [pytest.mark.cuda, needs(1)]
TWO, THREE = (pytest.param((count, 1), id=f"{count} hosts") for count in (2, 3))
TWO_OF_TWO = pytest.param((2, 2), id="2 hosts of 2 GPUs", marks=needs(2))
GRIDS = TWO, THREE, TWO_OF_TWO


def model_files(name: str, folder: Path) -> Path:
    """A model of at least three layers."""
    if name in QUANTIZED:
        return quantized_llama(name, folder)
    if name == "gemma3":
        return save(tiny_gemma3(**SIZES, query_pre_attn_scalar=32), folder)
    if name == "mixtral":
        return save(tiny_mixtral(head_dim=32), folder)
    if name in HYBRIDS:
        return save(HYBRIDS[name](), folder)
    return save(tiny_llama(head_dim=32), folder)


class Pair(NamedTuple):
    """One model on one GPU and on several hosts."""

    whole: LoadedModel
    divided: LoadedModel
    is_undivided: bool
    """Whether a host has one GPU, with the kernels and inputs of a single one."""


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Started once for all tests of a model."""
    name, (hosts, local) = request.param
    path = model_files(name, tmp_path_factory.mktemp(name) / "model")
    whole = load_model(path, device="cuda:0", split="none")
    with on_hosts(path, hosts, local, device="cuda", threads=2) as divided:
        yield Pair(whole, divided, local == 1)
    whole.unload()


def of_models(*names: str, grids: Sequence[Any] = (TWO, TWO_OF_TWO)) -> pytest.MarkDecorator:
    """The test runs with each of the models on each grid of hosts and GPUs."""
    pairs = [
        pytest.param((name, grid.values[0]), id=f"{name}-{grid.id}", marks=grid.marks)
        for name in names
        for grid in grids
    ]
    return pytest.mark.parametrize("pair", pairs, indirect=True)


def replies(loaded: LoadedModel, max_tokens: int = 40) -> list[tuple[int, ...]]:
    """Greedy replies of a batch."""
    engine = Engine(loaded.model, loaded.tokenizer, EngineOptions(max_batch=3, cache_tokens=4096))
    for number, ids in enumerate(PROMPTS):
        submit(engine, ask(list(ids), max_tokens=max_tokens, request_id=str(number)))
    ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    return [end.token_ids for end in sorted(ends, key=lambda end: end.request_id)]


@of_models("exl2", "gptq", "exl3", "float", "gemma3", "mixtral", "lfm2", "qwen3.5")
def test_the_logits_and_the_text_of_one_gpu(pair: Pair) -> None:
    expected, found = (logits_of(one.model) for one in (pair.whole, pair.divided))
    assert mean_kl(expected[0].cpu(), found[0].cpu()) <= 1e-4
    assert mean_kl(expected[1].cpu(), found[1].cpu()) <= 1e-5
    one, other = (logits_of_passes(loaded.model) for loaded in (pair.whole, pair.divided))
    assert mean_kl(one, other) <= 1e-4
    if pair.is_undivided:
        assert torch.equal(one, other)
    text = replies(pair.whole)
    for _ in range(2):  # the second time with the same graphs' shapes
        for prompt, *both in zip(PROMPTS, text, replies(pair.divided), strict=True):
            assert_alike(pair.whole.model, prompt, *both)
            assert both[0] == both[1] or not pair.is_undivided


@of_models("exl2", "qwen3.5", grids=[THREE])
def test_three_hosts(pair: Pair) -> None:
    """Two hosts have no layer of the hybrid with keys."""
    one, other = (logits_of_passes(loaded.model) for loaded in (pair.whole, pair.divided))
    assert torch.equal(one, other)


@of_models("exl2")
def test_passes_are_captured_and_do_not_run_ahead(pair: Pair) -> None:
    """The host waits for the other hosts, so it has read the tokens before the next pass."""
    model = pair.divided.model
    runner = Runner(model, store_for(model, KVFormat.FP16, 2))
    runner.run([Segment((5,), 0, (0,), LogitRows.LAST)])
    (graphs,) = runner._graphs
    assert graphs is not None
    assert len(graphs._graphs) == 1
    assert runner.next_pass([Segment((6,), 1, (0,), LogitRows.LAST)]) is None
    link = pair.divided.link
    assert (link is None) is pair.is_undivided
    print("link:", link)


@of_models("float", "qwen3.5")
@pytest.mark.parametrize("kv_format", [KVFormat.Q4, KVFormat.FP8])
def test_cache_formats(pair: Pair, kv_format: KVFormat) -> None:
    """Keys of 4 bits are smoothed by figures of a pass through all hosts. The first pass here is a
    decode step, which is captured."""
    models = pair.whole.model, pair.divided.model
    expected, found = (logits_of_passes(model, kv_format) for model in models)
    assert mean_kl(expected, found) <= 1e-3
    if pair.is_undivided:
        assert torch.equal(expected, found)


@of_models("exl2")
def test_long_prompts(pair: Pair) -> None:
    """Chunks that a host begins while the next one completes the chunk before."""
    torch.manual_seed(4)
    ids = torch.randint(3, VOCAB_SIZE, (3, 900)).tolist()
    found = []
    for loaded in (pair.whole, pair.divided):
        engine = Engine(
            loaded.model,
            loaded.tokenizer,
            EngineOptions(max_batch=3, cache_tokens=4096, prefill_chunk=256),
        )
        for number, one in enumerate(ids):
            submit(engine, ask(one, max_tokens=12, request_id=str(number)))
        ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
        found.append(sorted((end.request_id, end.token_ids) for end in ends))
    assert found[0] == found[1]


def test_heads_that_a_gpu_cannot_run_are_refused(tmp_path: Path) -> None:
    path = save(tiny_llama(head_dim=20), tmp_path / "model")
    with (
        pytest.raises(DeviceError, match="heads of this size"),
        on_hosts(path, 2, 1, device="cuda", threads=2),
    ):
        pass


@pytest.fixture
def has_server() -> None:
    for name in ("httpx2", "fastapi", "uvicorn", "typer", "prometheus_client"):
        pytest.importorskip(name, reason="needs the packages of the server and a client")


def text_of(path: Path) -> str:
    """Reply of one GPU."""
    loaded = load_model(path, device="cuda:0", split="none")
    engine = Engine(loaded.model, loaded.tokenizer)
    sampler = SamplerParams(temperature=0.0, token_bias={2: -100.0})
    submit(engine, ask(loaded.tokenizer.encode(PROMPT), max_tokens=TOKENS, sampler=sampler))
    (end,) = (event for event in run_all(engine) if isinstance(event, FinishEvent))
    loaded.unload()
    return loaded.tokenizer.decode(end.token_ids)


@pytest.fixture
def exl2(tmp_path: Path) -> Path:
    return quantized_llama("exl2", tmp_path / "model")


@pytest.mark.usefixtures("has_server")
@pytest.mark.parametrize("grid", GRIDS)
def test_serving(exl2: Path, tmp_path: Path, grid: tuple[int, int]) -> None:
    text, (hosts, local) = text_of(exl2), grid
    gpus = gpus_of_hosts(hosts, local)
    with job(tmp_path, *grid, [exl2] * hosts * local, serve=SERVE, gpus=gpus) as running:
        url = running.url()
        for _ in range(3):
            assert complete(url).json()["choices"][0]["text"] == text
        running.processes[0].send_signal(signal.SIGTERM)
        assert running.wait(START_S) == [0] * hosts * local
        assert not running.errors()
        assert is_free(url)
        assert all(not running.log(rank) for rank in range(1, hosts * local))


@pytest.mark.usefixtures("has_server")
@pytest.mark.parametrize("local", [1, pytest.param(2, marks=needs(2))])
def test_torchrun_on_two_nodes(exl2: Path, tmp_path: Path, local: int) -> None:
    text, gpus = text_of(exl2), gpus_of_hosts(2, local)
    with nodes(tmp_path, 2, local, exl2, serve=SERVE, gpus=gpus) as running:
        url = running.url()
        assert complete(url).json()["choices"][0]["text"] == text
        running.processes[0].send_signal(signal.SIGTERM)
        running.wait(START_S)
        assert is_free(url)


@pytest.mark.usefixtures("has_server")
@pytest.mark.parametrize(
    ("which", "how"),
    [
        (((2, 1), 1), (signal.SIGKILL, "rank 1 of 2 has ended (host 1)")),
        (((2, 1), 0), (signal.SIGKILL, "rank 0 of 2 has ended")),
        (((3, 1), 1), (signal.SIGSTOP, "rank 1 of 3 has not answered for 3.5 s (host 1)")),
        (((2, 1), 0), (signal.SIGSTOP, "rank 0 of 2 has not answered for 3.5 s")),
        pytest.param(
            *(((2, 2), 1), (signal.SIGKILL, "rank 1 of 4 has ended (host 0)")), marks=needs(2)
        ),
        pytest.param(
            *(((2, 2), 3), (signal.SIGKILL, "rank 3 of 4 has ended (host 1)")), marks=needs(2)
        ),
    ],
)
@pytest.mark.parametrize("load", ["idle", "busy"])
def test_a_process_that_ends_or_hangs_ends_all(
    exl2: Path, tmp_path: Path, which: tuple[tuple[int, int], int], how: tuple[int, str], load: str
) -> None:
    (grid, rank), (number, line) = which, how
    count, gpus = grid[0] * grid[1], gpus_of_hosts(*grid)
    with job(tmp_path, *grid, [exl2] * count, serve=SERVE, gpus=gpus) as running:
        url = running.url()
        assert complete(url).status_code == 200
        with requests_to(url) if load == "busy" else nullcontext():
            running.processes[rank].send_signal(number)
            others = [one for index, one in enumerate(running.processes) if index != rank]
            until = time.monotonic() + END_S
            codes = [one.wait(max(0.1, until - time.monotonic())) for one in others]
        assert codes == [1] * len(others)
        if rank == 0:  # its watchdog ends it even if it is stopped
            assert running.processes[0].wait(END_S) == -signal.SIGKILL
        assert running.errors() == [f"exl: error: {line}"]
        assert is_free(url)


@pytest.mark.usefixtures("has_server")
def test_other_model_files_on_one_host(exl2: Path, tmp_path: Path) -> None:
    other = save(tiny_llama(head_dim=32), tmp_path / "other")
    gpus = gpus_of_hosts(2, 1)
    with job(tmp_path, 2, 1, [exl2, other], serve=SERVE, gpus=gpus) as running:
        assert running.wait(START_S)[0] == 1
        assert running.errors() == [
            "exl: error: rank 1 of 2 has read other model files than rank 0"
        ]


@pytest.mark.usefixtures("has_server")
def test_a_host_without_a_gpu(exl2: Path, tmp_path: Path) -> None:
    gpus = [gpus_of_hosts(1, 1)[0], ""]
    with job(tmp_path, 2, 1, [exl2] * 2, serve=SERVE, gpus=gpus) as running:
        assert running.wait(START_S)[0] != 0
        (line,) = running.errors()
        assert line.startswith("exl: error: rank 1 of 2 failed: ")
