"""Workers in other processes: on this machine, or as actors of a Ray cluster.

Each replica has the whole model. One thread per replica hands it items and passes its records on.
Only this module imports Ray, and only if a cluster was named. It knows no kind of work: a
`ReplicaJob` is sent to the other process, and opens a `Worker` there.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from exl_core.errors import ExlError, RequestError
from exl_core.settings import available_cpus, set_for_libraries

LOCAL_RAY = "local"
_POLL_S = 0.2
_CONNECT_S = 5.0
Answers = Iterator[tuple[int, Any]]
"""Number and record of each item, in any order."""


class Worker(Protocol):
    """An open model that computes the records of items."""

    def answer(self, items: Sequence[Any]) -> Answers: ...


class ReplicaJob(Protocol):
    """Work that can be sent to another process (pickled), and opens its model there."""

    @property
    def device(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    def placed(self, device: str, threads: int | None) -> Self: ...
    def worker(self, *, is_quiet: bool) -> Worker: ...


class Replica(Protocol):
    """A worker elsewhere. `answer` raises `ReplicaError` if the worker fails or dies."""

    def answer(self, items: Sequence[Any]) -> Answers: ...
    def close(self) -> None: ...


class ReplicaError(ExlError):
    """A replica failed. `exit_code` is that of its error."""

    def __init__(self, number: int, what: str, exit_code: int = 1) -> None:
        super().__init__(what, where=f"replica {number}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class _Failure:
    """Error of a worker, as text: errors with arguments of their own cannot be pickled."""

    text: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        code = error.exit_code if isinstance(error, ExlError) else 1
        return cls(str(error) or type(error).__name__, code)


@contextmanager
def opened(
    job: ReplicaJob, count: int | None, address: str | None, *, units: int, is_quiet: bool
) -> Iterator[Sequence[Replica]]:
    """Replicas of the job: `count` processes, or actors of the Ray cluster at `address`, but no
    more than the `units` of the work. They end with the context."""
    most = max(1, units)
    replicas: list[Replica] = []
    with ExitStack() as stack:
        if address is None:
            found = _local_replicas(job, min(count or 1, most), is_quiet=is_quiet)
        else:
            found = _ray_replicas(job, count, most, stack.enter_context(connected(address)))
        for replica in found:
            stack.callback(replica.close)
            replicas.append(replica)
        yield replicas


def answer_with(
    replicas: Sequence[Worker],
    items: Sequence[Any],
    unit: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Answers:
    """Records of all items, in the order in which they are done. Each replica takes the next `unit`
    items when it has answered its own."""
    units = iter([items[first : first + unit] for first in range(0, len(items), unit)])
    answers: queue.SimpleQueue[tuple[int, Any] | ReplicaError | None] = queue.SimpleQueue()
    lock = threading.Lock()

    def drive(replica: Worker) -> None:
        try:
            while True:
                with lock:
                    own = next(units, None)
                if own is None:
                    break
                for answer in replica.answer(own):
                    answers.put(answer)
        except ReplicaError as error:
            answers.put(error)
        answers.put(None)

    for replica in replicas:
        threading.Thread(target=drive, args=(replica,), daemon=True).start()
    live = len(replicas)
    while live and not is_stopped():
        try:
            answer = answers.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if isinstance(answer, ReplicaError):
            raise answer
        if answer is None:
            live -= 1
        else:
            yield answer


def _local_replicas(job: ReplicaJob, count: int, *, is_quiet: bool) -> Iterator[Replica]:
    """Processes on this machine, which share its CPUs, each on a GPU of its own if there are
    enough."""
    for number in range(count):
        own = _placed(job, number, count)
        yield LocalReplica(number, own, is_quiet=is_quiet or number > 0)


def _placed(job: ReplicaJob, number: int, count: int) -> ReplicaJob:
    import torch

    gpus = torch.cuda.device_count()
    device = f"cuda:{number % gpus}" if gpus and job.device in ("auto", "cuda") else job.device
    return job.placed(device, job.threads or max(1, available_cpus() // count))


class LocalReplica:
    """A worker in a process of its own. It ends with this process."""

    def __init__(self, number: int, job: ReplicaJob, *, is_quiet: bool) -> None:
        self._number = number
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit the threads of torch
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, job, is_quiet), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, items: Sequence[Any]) -> Answers:
        try:
            self._pipe.send(items)
            while True:
                answer = self._pipe.recv()
                if answer is None:
                    return
                if isinstance(answer, _Failure):
                    raise ReplicaError(self._number, answer.text, answer.exit_code)
                yield answer
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise ReplicaError(self._number, f"the process ended with code {code}") from error

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(pipe: Connection, job: ReplicaJob, is_quiet: bool) -> None:
    """Body of a worker's process. Ctrl-C in a terminal reaches all processes; the first one
    decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = job.worker(is_quiet=is_quiet)
        while True:
            for answer in worker.answer(pipe.recv()):
                pipe.send(answer)
            pipe.send(None)
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - the first process reports it
        pipe.send(_Failure.of(error))


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ray, connected to a cluster, or to a local one that this process starts."""
    if address == LOCAL_RAY:
        # Ray listens on all interfaces, whatever the node's address. A token protects its ports.
        set_for_libraries(RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise RequestError(
            "Ray is not installed",
            expected="the package ray, for --ray",
            next_step="python -m pip install 'exl-cli[ray]'",
        ) from error
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL_RAY:
        settings |= {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
    else:
        _check_reachable(address)
        settings["address"] = address
    try:
        ray.init(**settings)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ExlError("Ray cannot be reached", where=address, got=str(error)[:200]) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises ExlError if nothing listens at HOST:PORT. Ray itself would try for ten minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # 'auto', or a name that Ray resolves
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ExlError("Ray cannot be reached", where=address, got=str(error)) from error


def _ray_replicas(job: ReplicaJob, count: int | None, most: int, ray: Any) -> Iterator[Replica]:
    """Actors of the cluster. Each takes a GPU if the cluster has some, else its share of the CPUs.
    `count` None: one per GPU, or one."""
    owned = ray.cluster_resources()
    gpus = int(owned.get("GPU", 0))
    wanted = min(count or gpus or 1, most)
    cpus = max(1, int(owned.get("CPU", 1)) // wanted)
    if not gpus:
        job = job.placed(job.device, job.threads or cpus)
    needs = {"num_gpus": 1} if gpus else {"num_cpus": cpus}
    actor = ray.remote(**needs)(_Actor)
    for number in range(wanted):
        yield RayReplica(number, ray, actor.remote(job))


class _Actor:
    """Body of a Ray actor. The first call opens the model."""

    def __init__(self, job: ReplicaJob) -> None:
        self._job = job
        self._worker: Worker | None = None

    def answer(self, items: Sequence[Any]) -> list[tuple[int, Any]] | _Failure:
        try:
            if self._worker is None:
                self._worker = self._job.worker(is_quiet=True)
            return list(self._worker.answer(items))
        except Exception as error:  # noqa: BLE001 - the first process reports it
            return _Failure.of(error)


class RayReplica:
    """A worker in an actor of Ray."""

    def __init__(self, number: int, ray: Any, actor: Any) -> None:
        self._number = number
        self._ray = ray
        self._actor = actor

    def answer(self, items: Sequence[Any]) -> Answers:
        try:
            answers = self._ray.get(self._actor.answer.remote(items))
        except self._ray.exceptions.RayError as error:
            raise ReplicaError(self._number, str(error).splitlines()[0]) from error
        if isinstance(answers, _Failure):
            raise ReplicaError(self._number, answers.text, answers.exit_code)
        yield from answers

    def close(self) -> None:
        self._ray.kill(self._actor)
