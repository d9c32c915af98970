"""Processes for the other ranks on rank 0's machine, which may start before rank 0 imports torch.

A process imports what it needs and then waits for its settings, which are the first message on its
sockets. It inherits two socket pairs, and ends when rank 0's ends of them close. Imports no torch.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Event

from exl_core.parallel.background import in_background
from exl_core.parallel.nccl_library import Communicator, free_when_made, load, new_id
from exl_core.parallel.plan import MOST_RANKS, Rank
from exl_core.settings import switch_off_multicast, visible_gpus

MODULE = "exl_core.session.follower"
CONNECT = b"N"
"""First byte of a message before the settings: the number of ranks, and the id with which the GPUs
connect."""


class RankProcess:
    """A process of one rank, and rank 0's ends of its sockets: for messages, and for reports."""

    def __init__(self, rank: int, module: str = MODULE, *, may_use_gpu: bool = False) -> None:
        """Starts `python -m module`. With `may_use_gpu` it starts GPU number `rank` while it
        imports torch."""
        ends = [socket.socketpair() for _ in range(2)]
        inherited = [theirs.detach() for _, theirs in ends]
        arguments = (*inherited, rank, int(may_use_gpu))
        switch_off_multicast()  # before the process exists: it inherits the environment
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for rank 0
            )
        finally:
            for fd in inherited:
                socket.socket(fileno=fd).close()
        self.rank = rank
        self.messages, self.reports = (Connection(ours.detach()) for ours, _ in ends)

    def configure(self, settings: Mapping[str, object]) -> None:
        """Sends the settings. A process that has ended meanwhile is noticed by its reports."""
        with suppress(OSError):
            self.messages.send_bytes(json.dumps(dict(settings)).encode())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class _Connection:
    """GPUs of this process and of those that start with it, which connect while all of them import
    torch. `comm` is that of this process. `is_sent`: the others connect too."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self.is_sent = False
        self._was_tried = Event()
        self._processes = processes
        self.comm = in_background(self._connect)

    def wait(self) -> None:
        """Waits until the others have been told, or cannot be."""
        self._was_tried.wait()

    def _connect(self) -> Communicator:
        rank = Rank(0, len(self._processes) + 1)
        try:
            library = load(is_first=True)
            identity = new_id(library)
            for one in self._processes:
                one.messages.send_bytes(CONNECT + bytes([rank.count]) + identity)
            self.is_sent = True
        finally:
            self._was_tried.set()
        return Communicator(library, identity, rank, 0)


_ahead: list[RankProcess] = []
_connections: list[_Connection] = []  # that of `_ahead`, or of the processes that a load has taken


def start_ahead(num_ranks: int, *, may_use_gpu: bool) -> None:
    """Starts the other ranks of the next load with `tensor_parallel=num_ranks`, which takes them.

    They import torch while this process does, and GPUs connect meanwhile. They end with it if no
    load takes them. Starts none if there are fewer GPUs than ranks, which the load will refuse.
    """
    drop_ahead()
    if num_ranks > MOST_RANKS or (may_use_gpu and 0 < visible_gpus() < num_ranks):
        return
    _ahead.extend(RankProcess(rank, may_use_gpu=may_use_gpu) for rank in range(1, num_ranks))
    if may_use_gpu and visible_gpus():
        _connections.append(_Connection([*_ahead]))


def drop_ahead() -> None:
    """Ends the processes of `start_ahead` that no load has taken."""
    for one in _ahead:
        one.kill()
    _ahead.clear()
    for connection in _connections:
        free_when_made(connection.comm)
    _connections.clear()


def take_connection() -> Future[Communicator] | None:
    """The connection of this process's GPU with those of the processes that `start` has returned,
    if they have begun to connect while they started."""
    taken = _connections.pop() if _connections else None
    return None if taken is None or not taken.is_sent else taken.comm


def start(num_ranks: int, module: str, *, may_use_gpu: bool) -> list[RankProcess]:
    """Processes of all ranks from 1 on: those that were started ahead, or new ones."""
    if module == MODULE and len(_ahead) == num_ranks - 1:
        found = [*_ahead]
        for connection in _connections:
            connection.wait()  # the settings follow
        _ahead.clear()
        return found
    drop_ahead()
    found = []
    try:
        for rank in range(1, num_ranks):
            found.append(RankProcess(rank, module, may_use_gpu=may_use_gpu))
    except BaseException:
        for one in found:
            one.kill()
        raise
    return found
