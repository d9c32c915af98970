"""Failures of one rank of two or four on GPUs: a prompt end, one line that names rank and cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import create_server

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FailEvent
from exl_core.errors import ExlError, RankError
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.session import ranks
from exl_core.session.load import LoadedModel, load_model
from support import limited_follower
from support.driving import ask, submit
from support.rank_failures import is_alive, processes_of, remains, starting_with
from support.tiny_models import save, tiny_llama

END_LIMIT_S = 5.0
STEPS = 40
"""Passes before a failure: the graph of a decode step has been captured and replayed."""
MB = 1 << 20


def ranks_of(*counts: int) -> pytest.MarkDecorator:
    found = [
        pytest.param(
            count,
            id=f"{count} ranks",
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < count, reason=f"needs {count} GPUs"
            ),
        )
        for count in counts
    ]
    return pytest.mark.parametrize("count", found)


pytestmark = [pytest.mark.cuda, ranks_of(2, 4)]


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A temporary folder of this test alone, in which nothing of the ranks is left. Prints what is
    left in shared memory, where other programs may write too."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = remains()
    yield
    assert not list(folder.glob("exl-ranks-*"))
    print("left in shared memory:", *remains() - before)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(tiny_llama(head_dim=32), tmp_path / "tiny")


def large(folder: Path) -> Path:
    """A model of which every one of four ranks has about 100 MB."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    model = tiny_llama(**sizes, num_attention_heads=16, num_key_value_heads=4, head_dim=128)
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    return save(model, folder)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Limits the memory that one rank may allocate, by its number and bytes."""
    path = os.pathsep.join((str(Path(__file__).parents[1]), *filter(None, sys.path)))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(ranks, "MODULE", limited_follower.MODULE)

    def set_limit(rank: int, limit_bytes: int) -> None:
        monkeypatch.setenv(limited_follower.LIMIT, f"{rank}:{limit_bytes}")

    return set_limit


def running(loaded: LoadedModel) -> Engine:
    engine = Engine(loaded.model, loaded.tokenizer, EngineOptions(cache_tokens=4096))
    submit(engine, ask([5, 6, 7], max_tokens=None, stop_ids=frozenset()))
    for _ in range(STEPS):
        engine.step()
    return engine


def ended(engine: Engine, hurt: Callable[[], object]) -> tuple[RankError, float]:
    """The error of a running engine, and the seconds from `hurt` on until it came."""
    started: list[float] = []

    def act() -> None:
        started.append(time.monotonic())
        hurt()

    threading.Timer(0.3, act).start()
    until = time.monotonic() + 60
    with pytest.raises(RankError) as caught:
        while time.monotonic() < until:
            if engine.is_idle:
                submit(engine, ask([5, 6, 7], max_tokens=None, stop_ids=frozenset()))
            engine.step()
    seconds = time.monotonic() - started[0]
    (last,) = (event for event in engine.step() if isinstance(event, FailEvent))
    assert isinstance(last.error, RankError)
    assert "\n" not in str(caught.value)
    print(f"{seconds:.2f} s: {caught.value}", flush=True)
    return caught.value, seconds


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGSTOP, "has not answered for 3.5 s"),
    ],
)
def test_a_lost_rank_is_named(tiny: Path, count: int, number: signal.Signals, cause: str) -> None:
    """The last rank is lost while graphs are replayed."""
    loaded = load_model(tiny, device="cuda", tensor_parallel=count)
    processes = processes_of(loaded)
    try:
        engine = running(loaded)
        error, seconds = ended(engine, lambda: os.kill(processes[-1], number))
        assert str(error) == f"rank {count - 1} of {count} {cause}"
        assert seconds < END_LIMIT_S
    finally:
        loaded.unload()
    assert not any(map(is_alive, processes))


def test_a_rank_without_memory_ends_a_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: Callable[[int, int], None],
    count: int,
) -> None:
    path, last = large(tmp_path / "large"), count - 1
    made = starting_with(monkeypatch)
    for limit_bytes in (2 * MB, 60 * MB):
        limit(last, limit_bytes)
        with pytest.raises(ExlError) as caught:
            load_model(path, device="cuda", tensor_parallel=count).unload()
        print(f"{limit_bytes >> 20} MB: {caught.value}", flush=True)
        assert f"rank {last} of {count} failed: " in str(caught.value)
        assert "memory" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not any(is_alive(one) for group in made for one in group.process_ids)


def test_a_rank_without_memory_ends_a_pass(
    tiny: Path, limit: Callable[[int, int], None], count: int
) -> None:
    """Prompts fill a cache whose memory one GPU does not have."""
    limit(count - 1, 300 * MB)
    loaded = load_model(tiny, device="cuda", tensor_parallel=count)
    processes = processes_of(loaded)
    store = store_for(loaded.model, KVFormat.FP16, 8192, grows=True)
    runner = Runner(loaded.model, store)
    ids = tuple(range(3, 203)) * 10
    started = time.monotonic()
    with pytest.raises(RankError, match=rf"rank {count - 1} of {count} failed: .*memory") as caught:
        for first in range(0, 8192, 8):
            pages = tuple(range(first, first + 8))
            runner.run([Segment(ids, 0, pages, LogitRows.LAST)]).cpu()
            started = time.monotonic()
    assert time.monotonic() - started < END_LIMIT_S
    assert "\n" not in str(caught.value)
    print(caught.value)
    loaded.unload()
    assert not any(map(is_alive, processes))


def test_other_files_on_one_rank(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    other = save(tiny_llama(head_dim=32, intermediate_size=96), tmp_path / "other")
    made = starting_with(monkeypatch, count - 1, path=str(other))
    with pytest.raises(RankError) as caught:
        load_model(tiny, device="cuda", tensor_parallel=count)
    assert (
        str(caught.value) == f"rank {count - 1} of {count} has read other model files than rank 0"
    )
    assert not any(is_alive(one) for group in made for one in group.process_ids)


def test_a_port_in_use(tiny: Path, count: int) -> None:
    for name in ("fastapi", "uvicorn", "typer", "prometheus_client"):
        pytest.importorskip(name, reason="needs the packages of the server")
    with create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "exl_cli", "serve-lite", str(tiny), "--port", str(port)),
                *("--device", "cuda", "--tensor-parallel", str(count)),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("exl: error:")]
    print(done.stderr)
    assert done.returncode != 0
    assert len(errors) == 1
    assert str(port) in errors[0]
