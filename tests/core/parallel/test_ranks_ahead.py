"""Processes of ranks that start before torch is imported: a load takes them, or they end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from exl_core.model.context import Context
from exl_core.parallel import processes
from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.parallel.liveness import SILENCE_S
from exl_core.session.load import LoadedModel, load_model
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough

END_LIMIT_S = 5.0


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(tiny_llama(), tmp_path / "tiny")


def processes_of(loaded: LoadedModel) -> tuple[int, ...]:
    assert isinstance(loaded.model, LeadingTransformer)
    assert isinstance(loaded.model.followers, Followers)
    return loaded.model.followers.process_ids


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return state[0] != "Z"


def test_a_load_takes_the_processes_that_were_started_ahead(tiny: Path) -> None:
    processes.start_ahead(2, may_use_gpu=False)
    (ahead,) = [one.process.pid for one in processes._ahead]
    for is_first in (True, False):
        divided = load_model(tiny, device="cpu", threads=2, tensor_parallel=2)
        assert (processes_of(divided) == (ahead,)) is is_first
        assert Context(divided.model, 64).feed([[5, 6, 7]])[0].isfinite().all()
        divided.unload()
    assert not is_alive(ahead)


def test_another_number_of_ranks_ends_the_processes_that_were_started_ahead(tiny: Path) -> None:
    processes.start_ahead(2, may_use_gpu=False)
    (ahead,) = [one.process.pid for one in processes._ahead]
    divided = load_model(tiny, device="cpu", threads=2, tensor_parallel=3)
    assert not is_alive(ahead)
    assert len(processes_of(divided)) == 2
    divided.unload()


@pytest.mark.parametrize("has_library", [False, True])
def test_a_load_on_the_cpu_drops_a_connection_of_gpus(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    """Without NCCL the other rank is not told to connect. With it, its own attempt fails here."""
    freed: list[int] = []

    class Library:
        def ncclCommAbort(self, handle: int) -> None:  # noqa: N802
            freed.append(handle)

    class Connected:
        library, handle = Library(), 7

        def __init__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(processes, "visible_gpus", lambda: 2)
    if has_library:
        monkeypatch.setattr(processes, "load", lambda **_: Library())
        monkeypatch.setattr(processes, "new_id", lambda _: bytes(128))
        monkeypatch.setattr(processes, "Communicator", Connected)
    processes.start_ahead(2, may_use_gpu=True)
    (connection,) = processes._connections
    divided = load_model(tiny, device="cpu", threads=2, tensor_parallel=2)
    assert connection.is_sent is has_library
    assert not processes._connections
    assert freed == ([7] if has_library else [])
    assert Context(divided.model, 64).feed([[5, 6, 7]])[0].isfinite().all()
    divided.unload()


def test_no_process_starts_for_a_number_of_ranks_that_the_load_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "visible_gpus", lambda: 2)
    for count, may_use_gpu in ((65, False), (3, True)):
        processes.start_ahead(count, may_use_gpu=may_use_gpu)
        assert not processes._ahead


def test_processes_that_no_load_takes_end_with_rank_0() -> None:
    """They wait for a rank 0 that neither computes nor says anything."""
    script = (
        "import sys, time\n"
        "from exl_core.parallel import processes\n"
        "processes.start_ahead(3, may_use_gpu=False)\n"
        "assert 'torch' not in sys.modules\n"
        "print(*[one.process.pid for one in processes._ahead], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as leader:
        assert leader.stdout is not None
        started = [int(number) for number in leader.stdout.readline().split()]
        time.sleep(SILENCE_S + 1.5)
        assert len(started) == 2
        assert all(map(is_alive, started))
        leader.kill()
    until = time.monotonic() + END_LIMIT_S
    while any(map(is_alive, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, started))
