"""A follower's side: reports that it lives, and runs what rank 0 says.

Imports only the standard library, so that the reports begin before torch is imported.
"""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock, Thread
from time import sleep
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from exl_core.cache.store import KVStore
    from exl_core.model.adapters import Adapter
    from exl_core.parallel.model import RankTransformer
    from exl_core.parallel.wire import Message

    LoadAdapter = Callable[[Path, RankTransformer], Adapter]

BEAT_S = 0.5
LOST_LEADER = 1
"""Exit status of a follower whose rank 0 has ended."""


FAREWELL = b"E"
"""Rank 0's last word to a follower that another program has started."""


class Reports:
    """Reports to rank 0 (`Group`). If rank 0 has ended, the process ends at the next one, after
    `on_loss` if rank 0 has not said so before."""

    def __init__(self, connection: Connection, on_loss: Callable[[], None] | None = None) -> None:
        self._connection = connection
        self._on_loss = on_loss
        self._lock = Lock()
        Thread(target=self._beat, name="exl-beat", daemon=True).start()

    def loaded(self, digest: str) -> None:
        self._send(b"L" + digest.encode())

    def failed(self, line: str, exit_code: int) -> None:
        self._send(b"F" + f"{exit_code} {line}".encode()[:4096])

    def _beat(self) -> None:
        while True:
            self._send(b"B")
            sleep(BEAT_S)

    def _send(self, report: bytes) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(report)
        except OSError:
            self.lost()

    def lost(self) -> NoReturn:
        """Ends the process, as exchanges of other threads would keep it alive."""
        if self._on_loss is not None and not self._has_farewell():
            self._on_loss()
        os._exit(LOST_LEADER)

    def _has_farewell(self) -> bool:
        with suppress(OSError, EOFError):
            return self._connection.poll(0) and self._connection.recv_bytes(8) == FAREWELL
        return False


class Follower:
    """Runs passes of a model as messages say, until END."""

    def __init__(self, model: RankTransformer, load: LoadAdapter) -> None:
        self._model = model
        self._load = load
        self._adapters: dict[int, Adapter] = {}
        self._stores: dict[int, KVStore] = {}

    def run(self, message: Message) -> None:
        """Does what one message says. RankError for a cache or an adapter that does not exist."""
        from exl_core.cache.page_pool import PageCopy
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
            case Operation.EMBED:
                self._model.embed(numbers_of(message))
            case Operation.STORE:
                made = store_for(self._model, format_of(message), header.pages)
                self._stores[header.store] = made
            case Operation.DROP:
                self._stores.pop(header.store, None)
            case Operation.ADAPT:
                self._adapt(header.adapter, *adapter_source(message))
            case Operation.FORGET:
                self._adapters.pop(header.adapter, None)
            case Operation.COPY:
                copies = [PageCopy(*numbers) for numbers in numbers_of(message).tolist()]
                self._store(header.store).copy_pages(copies)
            case Operation.MOVE:
                moves = [(source, target) for source, target in numbers_of(message).tolist()]
                self._store(header.store).move_pages(moves)
            case Operation.GIVE:
                pages = [(source, target) for source, target in numbers_of(message).tolist()]
                target_store = self._store(header.target_store)
                self._store(header.store).transfer_pages(target_store, pages)

    def _adapt(self, number: int, digest: str, path: Path) -> None:
        from exl_core.errors import RankError

        adapter = self._load(path, self._model)
        if adapter.digest != digest:
            raise RankError("the adapter has changed since rank 0 read it", where=path)
        self._adapters[number] = adapter

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
