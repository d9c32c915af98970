"""`exl serve-lite` on several hosts: processes as torchrun starts them, here all on one machine."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishEvent
from exl_core.errors import RequestError
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.parallel import rendezvous
from exl_core.parallel.plan import Grid
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import load_model
from exl_core.settings import Launched, launched
from support.adapters import random_pairs, stored, write_adapter
from support.driving import ask, run_all, submit
from support.families import HYBRID_FAMILIES, save_family
from support.launched_jobs import (
    PROMPT,
    SERVE,
    START_S,
    TOKENS,
    Job,
    complete,
    is_free,
    job,
    nodes,
    requests_to,
)
from support.rank_failures import nothing_left
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough

END_S = 5.0


@pytest.fixture(autouse=True)
def no_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nothing_left(monkeypatch, tmp_path):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(num_hidden_layers=3), tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return text_of(folder)


def text_of(folder: Path, *adapters: Path) -> str:
    """Reply of one process."""
    loaded = load_model(folder, device="cpu", exact=True)
    engine = Engine(loaded.model, loaded.tokenizer)
    uses = tuple(AdapterUse(load_adapter(one, loaded.model)) for one in adapters)
    ids = loaded.tokenizer.encode(PROMPT)
    sampler = SamplerParams(temperature=0.0, token_bias={2: -100.0})
    submit(engine, ask(ids, max_tokens=TOKENS, adapters=uses, sampler=sampler))
    (end,) = (event for event in run_all(engine) if isinstance(event, FinishEvent))
    return loaded.tokenizer.decode(end.token_ids)


@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_the_text_of_one_process(
    folder: Path, text: str, tmp_path: Path, hosts: int, local: int
) -> None:
    with job(tmp_path, hosts, local, [folder] * hosts * local) as running:
        url = running.url()
        for _ in range(2):
            assert complete(url).json()["choices"][0]["text"] == text
        running.processes[0].send_signal(signal.SIGTERM)
        assert running.wait(START_S) == [0] * hosts * local
        assert not running.errors()
        assert is_free(url)
        assert all(not running.log(rank) for rank in range(1, hosts * local))


@pytest.mark.parametrize(
    ("name", "local"), [("lfm2", 1), ("qwen3.5", 1), ("granite4-hybrid", 1), ("qwen3.5", 2)]
)
def test_recurrent_layers(tmp_path: Path, name: str, local: int) -> None:
    """The second request goes on from a snapshot of the first one's state."""
    path = save_family(name, HYBRID_FAMILIES[name](), tmp_path / "model")
    expected = text_of(path)
    with job(tmp_path, 2, local, [path] * 2 * local) as running:
        url = running.url()
        for _ in range(2):
            assert complete(url).json()["choices"][0]["text"] == expected
        assert not running.errors()


@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (1, 2), (2, 2)])
def test_each_host_reads_its_own_copy_of_an_adapter(
    folder: Path, text: str, tmp_path: Path, hosts: int, local: int
) -> None:
    model = tiny_llama(num_hidden_layers=3)
    tensors = stored(random_pairs(model) | random_pairs(model, linears=("lm_head",)))
    adapter = write_adapter(tmp_path / "one", tensors)
    copies = [adapter]
    for rank in range(1, hosts * local):
        copies.append(shutil.copytree(adapter, tmp_path / str(rank), copy_function=shutil.copyfile))
    expected = text_of(folder, adapter)
    assert expected != text
    own = [("--lora", str(one)) for one in copies]
    with job(tmp_path, hosts, local, [folder] * len(copies), own=own) as running:
        assert complete(running.url()).json()["choices"][0]["text"] == expected
        assert not running.errors()


def test_another_adapter_on_one_host(folder: Path, tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=3)
    one, other = (
        write_adapter(tmp_path / str(seed), stored(random_pairs(model, seed=seed)))
        for seed in (1, 2)
    )
    own = [("--lora", str(one)), ("--lora", str(other))]
    with job(tmp_path, 2, 1, [folder] * 2, own=own) as running:
        assert complete(running.url()).status_code == 503
        assert running.wait(END_S) == [1, 1]
        (line,) = running.errors()
        assert line.startswith(
            "exl: error: rank 1 of 2 failed: no adapter of this process is the one of rank 0"
        )


@pytest.mark.parametrize("cache", ["q4", "fp8"])
def test_cache_formats(tmp_path: Path, cache: str) -> None:
    """Keys of 4 bits are smoothed by figures of a pass through all hosts."""
    path = save(tiny_llama(head_dim=32), tmp_path / "model")
    with job(tmp_path, 2, 1, [path] * 2, "--cache-type", cache) as running:
        assert complete(running.url()).status_code == 200
        assert not running.errors()


@pytest.mark.parametrize(
    ("grid", "rank", "how"),
    [
        ((2, 1), 1, (signal.SIGKILL, "rank 1 of 2 has ended (host 1)")),
        ((1, 3), 2, (signal.SIGKILL, "rank 2 of 3 has ended (host 0)")),
        ((2, 1), 0, (signal.SIGKILL, "rank 0 of 2 has ended")),
        ((3, 1), 2, (signal.SIGSTOP, "rank 2 of 3 has not answered for 3.5 s (host 2)")),
        ((2, 1), 0, (signal.SIGSTOP, "rank 0 of 2 has not answered for 3.5 s")),
        ((3, 1), 0, (signal.SIGSTOP, "rank 0 of 3 has not answered for 3.5 s")),
        ((1, 3), 0, (signal.SIGSTOP, "rank 0 of 3 has not answered for 3.5 s")),
        ((2, 1), 1, (signal.SIGTERM, "rank 1 of 2 failed: stopped by SIGTERM")),
    ],
)
def test_a_process_that_ends_or_hangs_ends_all(
    folder: Path, tmp_path: Path, grid: tuple[int, int], rank: int, how: tuple[int, str]
) -> None:
    number, line = how
    with job(tmp_path, *grid, [folder] * grid[0] * grid[1]) as running:
        url = running.url()
        assert complete(url).status_code == 200
        running.processes[rank].send_signal(number)
        others = [one for index, one in enumerate(running.processes) if index != rank]
        until = time.monotonic() + END_S
        codes = [one.wait(max(0.1, until - time.monotonic())) for one in others]
        assert codes == [1] * len(others)
        if rank == 0:  # its watchdog ends it even if it is stopped
            assert running.processes[0].wait(max(0.1, until - time.monotonic())) == -signal.SIGKILL
        assert running.errors() == [f"exl: error: {line}"]
        assert is_free(url)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_lost_process_is_named_before_those_that_wait_for_it(
    folder: Path, tmp_path: Path, rank: int
) -> None:
    """The exchanges of other ranks fail too, some of them before rank 0 has noticed its end."""
    with job(tmp_path, 2, 2, [folder] * 4) as running:
        with requests_to(running.url()):
            running.processes[rank].kill()
            codes = running.wait(END_S)
        assert codes == [-signal.SIGKILL if index == rank else 1 for index in range(4)]
        line = f"rank {rank} of 4 has ended (host {rank // 2})"
        assert running.errors() == [f"exl: error: {line}"]


def test_a_full_disk_does_not_keep_rank_0(folder: Path, tmp_path: Path) -> None:
    """It cannot write the line to its log."""
    with job(tmp_path, 2, 1, [folder] * 2) as running:
        url = running.url()
        size = running.logs[0].stat().st_size
        resource.prlimit(running.processes[0].pid, resource.RLIMIT_FSIZE, (size, size))
        running.processes[1].kill()
        assert running.wait(END_S) == [1, -signal.SIGKILL]
        assert running.logs[0].stat().st_size == size
        assert is_free(url)


def test_other_model_files_on_one_host(folder: Path, tmp_path: Path) -> None:
    other = save(tiny_llama(num_hidden_layers=3, intermediate_size=96), tmp_path / "other")
    with job(tmp_path, 2, 1, [folder, other]) as running:
        assert running.wait(START_S)[0] == 1
        assert running.errors() == [
            "exl: error: rank 1 of 2 has read other model files than rank 0"
        ]


def test_a_copy_of_the_files_is_the_same_model(folder: Path, text: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    with job(tmp_path, 2, 1, [folder, copy]) as running:
        assert complete(running.url()).json()["choices"][0]["text"] == text


def test_a_port_in_use(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with job(tmp_path, 2, 1, [folder] * 2, "--port", port) as running:
            codes = running.wait(START_S)
            assert codes[0] == 2
            (line,) = running.errors()
            assert port in line
            assert line.startswith("exl: error: ")


def test_a_missing_model_on_one_host(folder: Path, tmp_path: Path) -> None:
    with job(tmp_path, 2, 1, [folder, tmp_path / "none"]) as running:
        assert running.wait(START_S)[0] == 3
        (line,) = running.errors()
        assert line.startswith("exl: error: rank 1 of 2 failed: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--models-dir", "."), "got torchrun and --models-dir"),
        (("--admin-key", "k"), "got torchrun and --admin-key"),
        (("--tensor-parallel", "3"), "torchrun decides about the processes of a host"),
        (("--split", "20,24"), "every rank has a part of every layer"),
    ],
)
def test_options_that_need_one_process_are_refused(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    with job(tmp_path, 2, 1, [folder] * 2, *arguments) as running:
        assert running.processes[0].wait(START_S) == 2
        assert expected in running.errors()[0]


def test_torchrun_itself(folder: Path, text: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log.open("wb") as written:
        agent = subprocess.Popen(
            [*start, "-m", "exl_cli", *SERVE, str(folder)], stdout=written, stderr=written
        )
    try:
        running = Job([agent], [log])
        url = running.url()
        assert complete(url).json()["choices"][0]["text"] == text
        agent.send_signal(signal.SIGTERM)
        agent.wait(20)
        assert is_free(url)
    finally:
        agent.kill()
        agent.wait()


def test_torchrun_on_two_nodes(folder: Path, text: str, tmp_path: Path) -> None:
    with nodes(tmp_path, 2, 1, folder) as running:
        url = running.url()
        assert complete(url).json()["choices"][0]["text"] == text
        running.processes[0].send_signal(signal.SIGTERM)
        running.wait(START_S)
        assert is_free(url)


def process(monkeypatch: pytest.MonkeyPatch, **changes: str) -> Launched | None:
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in {**variables, **changes}.items():
        monkeypatch.setenv(name, value)
    return launched()


def test_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    found = process(monkeypatch)
    assert found == Launched(1, 4, 1, 2, ("127.0.0.1", 29500), "run/0")
    for changes in (
        {"RANK": "4"},
        {"RANK": ""},
        {"LOCAL_RANK": "0"},
        {"WORLD_SIZE": "3"},
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"MASTER_PORT": "x"},
    ):
        with pytest.raises(RequestError, match="cannot form a group"):
            process(monkeypatch, **changes)


def test_other_addresses_than_loopback_need_a_trusted_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(rendezvous, "_own_address", lambda _: "10.0.0.5")
    monkeypatch.setattr(rendezvous, "_store", made.append)
    monkeypatch.setattr(rendezvous, "PrefixStore", lambda *_: None)
    one = Launched(0, 2, 0, 1, ("10.0.0.1", 29500), "run/0")
    with pytest.raises(RequestError, match=r"expected --trust-network.*got address 10.0.0.5"):
        rendezvous.Meeting(one)
    assert not made
    trusting = Launched(0, 2, 0, 1, ("10.0.0.1", 29500), "run/0", trusts_network=True)
    assert rendezvous.Meeting(trusting).address == "10.0.0.5"
    on_one_host = Launched(0, 2, 0, 2, ("10.0.0.1", 29500), "run/0")
    assert rendezvous.Meeting(on_one_host).address == "127.0.0.1"


def test_strangers_are_not_taken_for_ranks() -> None:
    token = bytes(range(16))
    hello = rendezvous._HELLO
    for data, expected in (
        (hello.pack(b"exlr", token, 1, 0, 3, 2), (0, 3, 2)),
        (hello.pack(b"exlr", bytes(16), 1, 0, 3, 2), None),
        (hello.pack(b"exlr", token, 2, 0, 3, 2), None),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (b"", None),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            assert rendezvous._identity(ours, token) == expected


def test_hosts_have_consecutive_layers(folder: Path) -> None:
    config = load_model(folder, device="cpu").config
    grid = Grid(2, 2)
    assert [grid.layers(config, rank) for rank in range(4)] == [range(1)] * 2 + [range(1, 3)] * 2
    assert [grid.rank_in_host(rank).index for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(RequestError, match="too few layers"):
        Grid(4, 1).layers(config, 0)
