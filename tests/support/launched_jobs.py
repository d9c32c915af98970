"""Processes of `exl serve-lite` as torchrun starts them, and requests to them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    import httpx2

SERVE = ("serve-lite", "--port", "0", "--device", "cpu", "--threads", "1", "--exact")
START_S, STOP_S = 90.0, 20.0
PROMPT, TOKENS = "abc", 24


@dataclass
class Job:
    """Processes of one job, by rank."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def url(self) -> str:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.processes[0].poll() is None:
            found = re.search(r" at (http://\S+)", self.log(0))
            if found:
                return found[1]
            time.sleep(0.1)
        raise AssertionError(self.log(0))

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text(encoding="utf-8")

    def errors(self) -> list[str]:
        """Lines of all processes together that report an error."""
        lines = [line for rank in range(len(self.logs)) for line in self.log(rank).splitlines()]
        assert not any("Traceback" in line for line in lines)
        return [line for line in lines if line.startswith("exl: error:")]

    def wait(self, limit_s: float) -> list[int]:
        """Exit codes, once all have ended."""
        until = time.monotonic() + limit_s
        return [one.wait(max(0.1, until - time.monotonic())) for one in self.processes]


def variables_of(rank: int, hosts: int, local: int, port: int, run: str) -> dict[str, str]:
    """torchrun's variables of a process. `port`: that of the store on the loopback interface."""
    found = {
        "RANK": rank,
        "WORLD_SIZE": hosts * local,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in found.items()}


@contextmanager
def job(
    tmp_path: Path,
    hosts: int,
    local: int,
    paths: Sequence[Path],
    *arguments: str,
    own: Sequence[Sequence[str]] = (),
    serve: Sequence[str] = SERVE,
    gpus: Sequence[str] | None = None,
) -> Iterator[Job]:
    """Starts the ranks with torchrun's variables. `paths`: the model of each rank; `own`: more
    arguments of each; `gpus`: `CUDA_VISIBLE_DEVICES` of each host."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = uuid.uuid4().hex
    started = Job([], [])
    try:
        for rank in range(hosts * local):
            variables = variables_of(rank, hosts, local, store.port, run)
            variables |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus[rank // local]}
            given = (*serve, str(paths[rank]), *arguments, *(own[rank] if own else ()))
            log = tmp_path / f"rank{rank}.log"
            with log.open("wb") as written:
                started.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "exl_cli", *given],
                        stdin=subprocess.DEVNULL,
                        stdout=written,
                        stderr=written,
                        env={**os.environ, **variables},
                    )
                )
            started.logs.append(log)
        yield started
    finally:
        for one in started.processes:
            one.kill()
            one.wait()


@contextmanager
def nodes(
    tmp_path: Path,
    hosts: int,
    local: int,
    path: Path,
    *,
    serve: Sequence[str] = SERVE,
    gpus: Sequence[str] | None = None,
) -> Iterator[Job]:
    """Starts torchrun itself, once for each host. `gpus`: as in `job`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = Job([], [])
    try:
        for node in range(hosts):
            start = [sys.executable, "-m", "torch.distributed.run"]
            start += ["--nnodes", str(hosts), "--node-rank", str(node)]
            start += ["--nproc-per-node", str(local), "--master-addr", "127.0.0.1"]
            start += ["--master-port", str(port), "-m", "exl_cli", *serve, str(path)]
            variables = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus[node]}
            log = tmp_path / f"node{node}.log"
            with log.open("wb") as written:
                started.processes.append(
                    subprocess.Popen(
                        start, stdout=written, stderr=written, env={**os.environ, **variables}
                    )
                )
            started.logs.append(log)
        yield started
    finally:
        for one in started.processes:
            one.terminate()  # torchrun ends its processes
        for one in started.processes:
            with suppress(subprocess.TimeoutExpired):
                one.wait(STOP_S)
            one.kill()
            one.wait()


def complete(url: str, tokens: int = TOKENS) -> httpx2.Response:
    import httpx2

    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "logit_bias": {"2": -100}}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=START_S)


@contextmanager
def requests_to(url: str) -> Iterator[None]:
    """Sends requests, one after the other, until the server ends."""

    def send() -> None:
        with suppress(Exception):  # the end of the server
            while complete(url, 400).status_code == 200:
                pass

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    time.sleep(0.5)
    yield
    sender.join(STOP_S)


def is_free(url: str) -> bool:
    """Whether nothing listens at the server's port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
