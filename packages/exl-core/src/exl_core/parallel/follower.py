"""A follower's side: reports that it lives, ends if rank 0 does not, and runs what rank 0 says.

Imports only the standard library, so that the reports begin before torch is imported.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection
from threading import Lock, Thread, current_thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, NoReturn

from exl_core.parallel.liveness import BEAT_S, SILENCE_S, RankWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from exl_core.cache.store import KVStore
    from exl_core.model.adapters import Adapter
    from exl_core.model.cuda_graphs import CudaGraphs
    from exl_core.parallel.model import RankTransformer
    from exl_core.parallel.wire import Message

    LoadAdapter = Callable[[str, Path, RankTransformer], Adapter]

LOST_LEADER = 1
"""Exit status of a follower whose rank 0 has ended or hangs."""
BEAT, LOADED, FAILED, DESERTED = b"B", b"L", b"F", b"H"
"""First bytes of reports: the follower lives, has loaded, cannot go on, or gives rank 0 up."""
FAREWELL, DONE = b"E", b"D"
"""Rank 0's last words to a follower, before a failure ends all and before END."""
DONE_S = 2.0
"""Time to end after `DONE`."""
LAST_WORD_S = 1.0
"""Time to read rank 0's last word after another connection has ended."""
LATER_S = 0.5
"""Ranks after the first follower wait so much longer for rank 0, as the first one says why all of
them end."""


class Reports:
    """Reports to rank 0 (`Group`), and rank 0's beats. If rank 0 ends or hangs, so does this
    process, after `on_end` or `on_hang` with a clause that says it."""

    def __init__(self, connection: Connection, leader: int | None = None) -> None:
        """`leader`: process id of rank 0 on the same machine."""
        self.rank = 1
        self.on_end: Callable[[str], None] | None = None
        """Called unless rank 0 has announced its end."""
        self.on_hang: Callable[[str], None] | None = None
        self.kills_leader = False
        """Whether rank 0's process is killed if it hangs: it does nothing but run the model."""
        self.folder: str | None = None
        """Folder in which the ranks meet. It is removed if rank 0 has ended before it could."""
        self._connection = connection
        self._watch = RankWatch(leader)
        if leader is not None:
            self._watch.limit_s = inf  # until `set_rank`: rank 0 has no thread that beats yet
        self._last_word = b""
        self._lock = Lock()
        self._reader = Thread(target=self._run, name="exl-beat", daemon=True)
        self._reader.start()

    def loaded(self, digest: str) -> None:
        self._send(LOADED + digest.encode())

    def joined(self) -> None:
        """Rank 0 has loaded too, and beats regularly from now on."""
        self._watch.has_loaded(self._limit_s)

    def set_rank(self, rank: int) -> None:
        """Says which rank this is, and how long it waits for a rank 0 on the same machine."""
        self.rank = rank
        if self._watch.process is not None:
            self._watch.limit_s = self._limit_s

    @property
    def _limit_s(self) -> float:
        return SILENCE_S + (LATER_S if self.rank > 1 else 0.0)

    def failed(self, line: str, exit_code: int) -> None:
        self._send(FAILED + f"{exit_code} {line}".encode(errors="backslashreplace")[:4096])

    def lost(self) -> NoReturn:
        """Ends the process, as exchanges of other threads would keep it alive."""
        if current_thread() is not self._reader:
            self._reader.join(LAST_WORD_S)  # it reads rank 0's last word, and ends the process
        with suppress(OSError, EOFError):
            while self._connection.poll(0):
                self._hear(self._connection.recv_bytes(8))
        if not self._last_word and self.on_end is not None:
            self.on_end("has ended")
        self._leave()

    def _run(self) -> None:
        """Beats, and reads rank 0's. Runs on a thread of its own."""
        said_s = -BEAT_S
        while True:
            now = monotonic()
            if now - said_s >= BEAT_S:
                self._send(BEAT)
                said_s = now
            try:
                while self._connection.poll(max(0.0, said_s + BEAT_S - monotonic())):
                    self._hear(self._connection.recv_bytes(8))
            except (EOFError, OSError):
                self.lost()
            if self._watch.hangs():
                self._give_up()

    def _hear(self, word: bytes) -> None:
        self._watch.heard()
        if word != BEAT:
            self._last_word = word
        if word == DONE:
            sleep(DONE_S)  # the main thread ends the process when it reads END
            os._exit(LOST_LEADER)

    def _give_up(self) -> NoReturn:
        line = f"has not answered for {self._watch.limit_s:g} s"
        self._send(DESERTED + line.encode())
        if self.on_hang is not None:
            self.on_hang(line)
        if self.kills_leader and self.rank == 1:
            self._watch.kill()
        self._leave()

    def _leave(self) -> NoReturn:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(LOST_LEADER)

    def _send(self, report: bytes) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(report)
        except OSError:
            self.lost()


class Follower:
    """Runs passes of a model as messages say, until END. `load` reads an adapter by its digest and
    by its folder on rank 0's host."""

    def __init__(self, model: RankTransformer, load: LoadAdapter) -> None:
        self._model = model
        self._load = load
        self._adapters: dict[int, Adapter] = {}
        self._stores: dict[int, KVStore] = {}
        self._graphs: dict[int, CudaGraphs] = {}

    def run(self, message: Message) -> None:
        """Does what one message says. RankError for a cache or an adapter that does not exist."""
        from exl_core.model.runner import store_for
        from exl_core.parallel.wire import (
            Operation,
            adapter_source,
            batch_of,
            format_of,
            numbers_of,
        )

        header = message.header
        match header.operation:
            case Operation.PASS:
                batch = batch_of(message, self._adapter)
                self._model.forward(batch, self._store(header.store))
            case Operation.REPLAY:
                self._replay(message)
            case Operation.EMBED:
                self._model.embed(numbers_of(message))
            case Operation.STORE:
                made = store_for(
                    self._model,
                    format_of(message),
                    header.pages,
                    grows=self._model.ops.device.type == "cuda",
                    num_states=header.states,
                )
                self._stores[header.store] = made
            case Operation.DROP:
                self._graphs.pop(header.store, None)
                self._stores.pop(header.store, None)
            case Operation.ADAPT:
                found = self._load(*adapter_source(message), self._model)
                self._adapters[header.adapter] = found
            case Operation.FORGET:
                self._adapters.pop(header.adapter, None)
            case _:
                self._copy(message)

    def _copy(self, message: Message) -> None:
        """Copies pages or states as rank 0 has done."""
        from exl_core.cache.page_pool import PageCopy
        from exl_core.cache.state import StateCopy
        from exl_core.parallel.wire import Operation, numbers_of

        header, numbers = message.header, numbers_of(message).tolist()
        match header.operation:
            case Operation.COPY:
                copies = [PageCopy(*one) for one in numbers]
                self._store(header.store).copy_pages(copies)
            case Operation.MOVE:
                moves = [(source, target) for source, target in numbers]
                self._store(header.store).move_pages(moves)
            case Operation.GIVE:
                pages = [(source, target) for source, target in numbers]
                target_store = self._store(header.target_store)
                self._store(header.store).transfer_pages(target_store, pages)
            case Operation.COPY_STATES:
                slots = [StateCopy(*one) for one in numbers]
                self._store(header.store).copy_states(slots)
            case Operation.GIVE_STATES:
                target_store = self._store(header.target_store)
                for source, target in numbers:
                    self._store(header.store).transfer_state(target_store, source, target)

    def finish(self) -> None:
        """Waits for passes that are queued on a GPU: rank 0's may wait for them too."""
        device = self._model.ops.device
        if device.type == "cuda":
            from torch import cuda

            cuda.synchronize(device)

    def _replay(self, message: Message) -> None:
        """Runs a graph, which is captured the first time, as on rank 0. A host whose layers have no
        such graph, or without a GPU, computes the pass without one."""
        from torch import inference_mode

        from exl_core.model.cuda_graphs import CudaGraphs
        from exl_core.model.runner import make_batch
        from exl_core.parallel.wire import segments_of

        number, segments = message.header.store, segments_of(message)
        store, has_gpu = self._store(number), self._model.ops.device.type == "cuda"
        if has_gpu and number not in self._graphs:
            self._graphs[number] = CudaGraphs(self._model, store)
        with inference_mode():
            found = self._graphs[number].run(segments, is_decided=True) if has_gpu else None
            if found is None:
                self._model.forward(make_batch(segments, store.page_size), store)

    def _adapter(self, number: int) -> Adapter:
        from exl_core.errors import RankError

        if number not in self._adapters:
            raise RankError("a message names no adapter", got=number)
        return self._adapters[number]

    def _store(self, number: int) -> KVStore:
        from exl_core.errors import RankError

        if number not in self._stores:
            raise RankError("a message names no cache", got=number)
        return self._stores[number]


def receive(connection: Connection, sequence: int) -> Message:
    """The next message, which must be number `sequence`. EOFError if rank 0 has ended."""
    from exl_core.parallel.wire import MESSAGE_LIMIT_BYTES, unpacked

    with suppress(ConnectionResetError):
        return unpacked(connection.recv_bytes(MESSAGE_LIMIT_BYTES), sequence)
    raise EOFError
