"""Ranks on two GPUs as processes: what a load takes and gives back, failures, and torchrun."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishEvent
from exl_core.errors import DeviceError, RankError
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.parallel.followers import Followers
from exl_core.parallel.nccl import Connecting
from exl_core.sampling.params import SamplerParams
from exl_core.session import ranks
from exl_core.session.load import LoadedModel, load_model
from exl_core.session.weights import Loading
from support.adapters import random_pairs, stored, write_adapter
from support.driving import ask, run_all, submit
from support.launched_jobs import PROMPT, START_S, TOKENS, Job, complete, is_free, job
from support.quantized_models import quantized_llama
from support.rank_failures import processes_of
from support.tiny_models import save, tiny_llama

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SERVE = ("serve-lite", "--port", "0", "--device", "cuda", "--threads", "2")
END_LIMIT_S = 5.0
TORCHRUN_END_S = 20.0
KEPT_BYTES = 8 << 20
"""Memory of a GPU that a driver may keep from one load to the next, by chance."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(tiny_llama(head_dim=32), tmp_path / "tiny")


def reply(loaded: LoadedModel, *adapters: AdapterUse) -> tuple[int, ...]:
    engine = Engine(loaded.model, loaded.tokenizer)
    sampler = SamplerParams(temperature=0.0, token_bias={2: -100.0})
    ids = loaded.tokenizer.encode(PROMPT)
    submit(engine, ask(ids, max_tokens=TOKENS, adapters=adapters, sampler=sampler))
    (end,) = (event for event in run_all(engine) if isinstance(event, FinishEvent))
    return end.token_ids


def text_of(path: Path, *adapters: Path) -> str:
    """Reply of one GPU."""
    loaded = load_model(path, device="cuda:0", split="none")
    uses = [AdapterUse(load_adapter(one, loaded.model)) for one in adapters]
    text: str = loaded.tokenizer.decode(reply(loaded, *uses))
    loaded.unload()
    return text


def free_bytes() -> tuple[int, int]:
    gc.collect()
    torch.cuda.empty_cache()
    first, second = (torch.cuda.mem_get_info(index)[0] for index in range(2))
    return first, second


@pytest.mark.skipif(
    "EXL_TEST_SHARED_GPUS" in os.environ, reason="other programs use memory of the GPUs"
)
def test_unload_frees_the_memory_of_both_gpus(tmp_path: Path) -> None:
    """Each load connects the GPUs anew, with some hundred MB of buffers."""
    path = quantized_llama("exl2", tmp_path / "model")
    free = []
    for _ in range(4):
        loaded = load_model(path, device="cuda", tensor_parallel=2)
        assert len(reply(loaded)) == TOKENS
        started = time.monotonic()
        loaded.unload()
        assert time.monotonic() - started < END_LIMIT_S
        del loaded
        free.append(free_bytes())
        print("free MB after a load:", *(one >> 20 for one in free[-1]), flush=True)
    for later in free[1:]:
        assert all(now >= then - KEPT_BYTES for now, then in zip(later, free[0], strict=True))


class Recorded(Connecting):
    """A connection that a test can look at."""

    made: list[Recorded]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made.append(self)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Connections of rank 0."""
    Recorded.made = []
    monkeypatch.setattr(ranks, "Connecting", Recorded)
    return Recorded.made


def test_a_failed_load_closes_the_exchange_that_it_does_not_need(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, connections: list[Recorded]
) -> None:
    """Rank 0 alone fails, after its GPU has been connected with the other one."""
    load = Loading.whole

    def whole(loading: Loading, *rest: Any) -> Any:
        load(loading, *rest)
        connections[0].exchange.result(30)
        raise MemoryError("rank 0")

    with monkeypatch.context() as patch:
        patch.setattr(Loading, "whole", whole)
        with pytest.raises(MemoryError, match="rank 0"):
            load_model(tiny, device="cuda", tensor_parallel=2)
    exchange = connections[0].exchange.result()
    assert exchange._comm is None
    assert exchange._freeing is not None
    exchange._freeing.join(END_LIMIT_S)
    assert not exchange._freeing.is_alive()
    with pytest.raises(RankError, match="have ended"):
        exchange.sum(torch.ones(4, device="cuda:0"))
    divided = load_model(tiny, device="cuda", tensor_parallel=2)  # the process is none the worse
    assert len(reply(divided)) == TOKENS
    divided.unload()


@pytest.mark.usefixtures("connections")
def test_a_rank_that_is_killed_while_gpus_connect_ends_the_load(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for the lost rank for ever."""
    made: list[Followers] = []
    started: list[float] = []
    tell = ranks.send_nccl_id

    def told(group: Followers) -> None:
        tell(group)
        made.append(group)
        assert group.nccl_id is not None
        group.nccl_id.result()
        os.kill(group.process_ids[0], signal.SIGKILL)
        started.append(time.monotonic())

    monkeypatch.setattr(ranks, "send_nccl_id", told)
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        load_model(tiny, device="cuda", tensor_parallel=2)
    assert time.monotonic() - started[0] < END_LIMIT_S


def test_a_failure_of_nccl_on_rank_0_ends_the_load(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for its id, and rank 0 has read nothing yet."""

    def fail() -> bytes:
        raise DeviceError("no NCCL")

    monkeypatch.setattr(ranks, "new_id", fail)
    with pytest.raises(DeviceError, match="no NCCL"):
        load_model(tiny, device="cuda", tensor_parallel=2)


AHEAD = """
import sys
from exl_core.parallel.processes import start_ahead
start_ahead(2, may_use_gpu=True)
assert "torch" not in sys.modules
from exl_core.model.context import Context
from exl_core.session.load import load_model
device, count = sys.argv[2], int(sys.argv[3])
loaded = load_model(sys.argv[1], device=device, threads=2, tensor_parallel=count)
assert (loaded.model.followers.connection is not None) is (sys.argv[4] == "True")
context = Context(loaded.model, 600)
assert context.feed([[5 + i % 200 for i in range(300)]])[0].isfinite().all()
assert context.feed([[5]])[0].isfinite().all()
loaded.unload()
print("done")
"""


@pytest.mark.parametrize(
    ("device", "count", "is_early"), [("cuda", 2, True), ("cpu", 2, False), ("cpu", 3, False)]
)
def test_gpus_connect_while_processes_start(
    tiny: Path, device: str, count: int, is_early: bool
) -> None:
    """A load on the CPU, or with another number of ranks, drops the connection."""
    done = subprocess.run(
        [sys.executable, "-c", AHEAD, str(tiny), device, str(count), str(is_early)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
    assert not done.returncode


def test_connections_stay_on_the_loopback_interface(tiny: Path) -> None:
    divided = load_model(tiny, device="cuda", tensor_parallel=2)
    owned = {
        str(link.readlink())
        for process in (os.getpid(), *processes_of(divided))
        for link in Path(f"/proc/{process}/fd").iterdir()
        if link.is_symlink()
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    ]
    own = [fields[1] for fields in rows if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned]
    divided.unload()
    loopback = ("0100007F:", "00000000000000000000000001000000:")
    assert all(address.startswith(loopback) for address in own), own


def test_nccl_has_no_multicast_channels(tiny: Path, tmp_path: Path) -> None:
    """Even if the user's environment turns NVLink multicast on."""
    script = (
        "import sys\n"
        "from exl_core.session.load import load_model\n"
        "load_model(sys.argv[1], device='cuda', tensor_parallel=2).unload()\n"
    )
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p")}
    subprocess.run(
        [sys.executable, "-c", script, str(tiny)],
        env={**os.environ, **debug, "NCCL_NVLS_ENABLE": "1"},
        timeout=90,
        check=True,
    )
    logs = [file.read_text(encoding="utf-8") for file in tmp_path.glob("nccl.*")]
    assert len(logs) == 2
    for log in logs:
        assert " 0 nvls channels" in log, log
        assert "NVLS multicast support is available" not in log


@pytest.fixture
def has_server() -> None:
    for name in ("httpx2", "fastapi", "uvicorn", "typer", "prometheus_client"):
        pytest.importorskip(name, reason="needs the packages of the server and a client")


@pytest.mark.usefixtures("has_server")
def test_processes_of_torchrun_on_one_host(tmp_path: Path) -> None:
    path = quantized_llama("exl2", tmp_path / "model")
    text = text_of(path)
    with job(tmp_path, 1, 2, [path] * 2, serve=SERVE) as running:
        url = running.url()
        for _ in range(3):
            assert complete(url).json()["choices"][0]["text"] == text
        running.processes[0].send_signal(signal.SIGTERM)
        assert running.wait(START_S) == [0, 0]
        assert not running.errors()
        assert is_free(url)


@pytest.mark.usefixtures("has_server")
def test_a_killed_process_of_torchrun_ends_all(tiny: Path, tmp_path: Path) -> None:
    """Its GPU's passes have an adapter, of which every process reads its part."""
    adapter = write_adapter(tmp_path / "one", stored(random_pairs(tiny_llama(head_dim=32))))
    expected = text_of(tiny, adapter)
    with job(tmp_path, 1, 2, [tiny] * 2, "--lora", str(adapter), serve=SERVE) as running:
        assert complete(running.url()).json()["choices"][0]["text"] == expected
        running.processes[1].kill()
        assert running.wait(TORCHRUN_END_S) == [1, -signal.SIGKILL]
        assert running.errors() == ["exl: error: rank 1 of 2 has ended (host 0)"]


@pytest.mark.usefixtures("has_server")
def test_torchrun_itself(tiny: Path, tmp_path: Path) -> None:
    log, text = tmp_path / "log", text_of(tiny)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log.open("wb") as written:
        agent = subprocess.Popen(
            [*start, "-m", "exl_cli", *SERVE, str(tiny)], stdout=written, stderr=written
        )
    try:
        running = Job([agent], [log])
        url = running.url()
        assert complete(url).json()["choices"][0]["text"] == text
        agent.send_signal(signal.SIGTERM)
        agent.wait(TORCHRUN_END_S)
        assert is_free(url)
    finally:
        agent.kill()
        agent.wait()
