"""Processes for the other ranks on rank 0's machine, which may start before rank 0 imports torch.

A process imports what it needs and then waits for its settings, which are the first message on its
sockets. It inherits two socket pairs, and ends when rank 0's ends of them close. Imports no torch.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

from exl_core.parallel.plan import MOST_RANKS
from exl_core.settings import visible_gpus

MODULE = "exl_core.session.follower"


class RankProcess:
    """A process of one rank, and rank 0's ends of its sockets: for messages, and for reports."""

    def __init__(self, rank: int, module: str = MODULE, *, may_use_gpu: bool = False) -> None:
        """Starts `python -m module`. With `may_use_gpu` it starts GPU number `rank` while it
        imports torch."""
        ends = [socket.socketpair() for _ in range(2)]
        inherited = [theirs.detach() for _, theirs in ends]
        arguments = (*inherited, rank, int(may_use_gpu))
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


_ahead: list[RankProcess] = []


def start_ahead(num_ranks: int, *, may_use_gpu: bool) -> None:
    """Starts the other ranks of the next load with `tensor_parallel=num_ranks`, which takes them.

    They import torch while this process does. They end with it if no load takes them. Starts none
    for a number of ranks that the load will refuse.
    """
    drop_ahead()
    if num_ranks > MOST_RANKS or (may_use_gpu and 0 < visible_gpus() < num_ranks):
        return
    _ahead.extend(RankProcess(rank, may_use_gpu=may_use_gpu) for rank in range(1, num_ranks))


def drop_ahead() -> None:
    """Ends the processes of `start_ahead` that no load has taken."""
    for one in _ahead:
        one.kill()
    _ahead.clear()


def start(num_ranks: int, module: str, *, may_use_gpu: bool) -> list[RankProcess]:
    """Processes of all ranks from 1 on: those that were started ahead, or new ones."""
    if module == MODULE and len(_ahead) == num_ranks - 1:
        found = [*_ahead]
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
