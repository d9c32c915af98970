"""Failures of ranks that a load meets: an end within 5 s, and nothing left.

`test_rank_processes.py` kills and stops ranks.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exl_core.engine.engine import Engine
from exl_core.errors import OutOfMemoryError, RankError
from exl_core.parallel.followers import Group
from exl_core.session import ranks
from exl_core.session.load import load_model
from support import small_follower
from support.driving import ask, submit
from support.rank_failures import listening, nothing_left, processes_of, starting_with
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough

END_LIMIT_S = 5.0
MB = 1 << 20


@pytest.fixture(autouse=True)
def no_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nothing_left(monkeypatch, tmp_path):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 MB in its file."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return save(tiny_llama(**sizes, **heads), tmp_path_factory.mktemp("large") / "large")


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_without_memory_ends_the_load(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    stamp, last = tmp_path / "stamp", count - 1
    path = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, sys.path)))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(small_follower.SPACE, f"{last}:{40 * MB}:{stamp}")
    monkeypatch.setattr(ranks, "MODULE", small_follower.MODULE)
    with pytest.raises(RankError) as caught:
        load_model(large, device="cpu", threads=2, tensor_parallel=count)
    assert time.monotonic() - float(stamp.read_text(encoding="ascii")) < END_LIMIT_S
    caught.match(rf"^rank {last} of {count} failed: .*[Mm]emory")
    assert "\n" not in str(caught.value)


def test_a_rank_0_without_memory_ends_the_load(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def no_memory(_: object) -> int:
        asked.append(time.monotonic())
        return 1000

    monkeypatch.setattr(ranks, "free_memory_bytes", no_memory)
    with pytest.raises(OutOfMemoryError, match="do not fit into memory"):
        load_model(tiny, device="cpu", threads=2, tensor_parallel=3)
    assert time.monotonic() - asked[0] < END_LIMIT_S


def test_other_files_on_one_rank_end_the_load(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time counts from the end of rank 0's own load."""
    other = save(tiny_llama(intermediate_size=96), tmp_path / "other")
    starting_with(monkeypatch, 2, path=str(other))
    loaded: list[float] = []
    meet = Group.meet

    def met(group: Group, *rest: Any) -> Any:
        group._loaded.wait()
        loaded.append(time.monotonic())
        return meet(group, *rest)

    monkeypatch.setattr(Group, "meet", met)
    with pytest.raises(RankError, match=r"^rank 2 of 3 has read other model files than rank 0$"):
        load_model(tiny, device="cpu", threads=3, tensor_parallel=3)
    assert time.monotonic() - loaded[0] < END_LIMIT_S


def test_unload_and_failures_free_the_port_and_the_model(tiny: Path) -> None:
    """The error of a failure keeps neither the model nor the port of its exchange."""
    before = listening(os.getpid())
    divided = load_model(tiny, device="cpu", threads=2, tensor_parallel=2)
    assert listening(os.getpid()) - before
    divided.unload()
    assert not listening(os.getpid()) - before

    divided = load_model(tiny, device="cpu", threads=2, tensor_parallel=2)
    engine = Engine(divided.model, divided.tokenizer)
    submit(engine, ask([5, 6, 7], max_tokens=None, stop_ids=frozenset()))
    engine.step()
    os.kill(processes_of(divided)[0], signal.SIGKILL)
    found = None
    while found is None:
        try:
            engine.step()
        except RankError as error:
            found = str(error)
    assert found == "rank 1 of 2 was killed by SIGKILL"
    model = weakref.ref(divided.model)
    del divided, engine
    gc.collect()
    assert model() is None
    assert not listening(os.getpid()) - before


def test_a_transfer_ends_with_the_ranks_even_if_gloo_waits(tmp_path: Path) -> None:
    """Gloo may miss the end of a process, and frees nothing until its own time limit."""
    program = """
import sys, threading, time
from pathlib import Path
import torch
from exl_core.errors import RankError
from exl_core.parallel.exchange import GlooExchange
from exl_core.parallel.plan import Rank

folder, ended, others = Path(sys.argv[1]), threading.Event(), []
silent = lambda: others.append(GlooExchange.in_folder(folder, Rank(1, 2)))
threading.Thread(target=silent).start()
exchange = GlooExchange.in_folder(folder, Rank(0, 2), ended.is_set)
threading.Timer(1.0, ended.set).start()
start = time.monotonic()
try:
    exchange.sum(torch.ones(4))
except RankError as error:
    print(f"{time.monotonic() - start} {error}")
exchange.close()
"""
    start = time.monotonic()
    command = [sys.executable, "-c", program, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    seconds, _, line = found.stdout.strip().partition(" ")
    assert line.startswith("rank 0: the exchange with the other ranks failed"), found
    assert 1.0 <= float(seconds) < 3.0 and found.returncode == 0
    assert time.monotonic() - start < 30.0  # imports; gloo itself waits for 60 s
