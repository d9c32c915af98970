"""Process of one rank, started by `session/ranks.py` or by torchrun.

Loads the rank's part of the model, and then runs the passes that rank 0 describes until it ends.
Started by rank 0 it reads everything from two inherited sockets, whose numbers are its arguments.
It prints nothing, except if rank 0 hangs.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from exl_core.errors import ExlError, RankError
from exl_core.parallel.background import in_background
from exl_core.parallel.follower import Follower, Reports, receive
from exl_core.parallel.plan import Rank
from exl_core.parallel.processes import CONNECT

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import FrameType

    from exl_core.model.adapters import Adapter
    from exl_core.ops.table import OpTable
    from exl_core.parallel.exchange import Exchange
    from exl_core.parallel.follower import LoadAdapter
    from exl_core.parallel.hosts import HostTransformer
    from exl_core.parallel.model import RankTransformer
    from exl_core.parallel.nccl import Connecting
    from exl_core.parallel.nccl_library import Communicator
    from exl_core.session.load import LoadOptions
    from exl_core.session.open import ModelFiles
    from exl_core.settings import Launched


CAUSE_S = 2.0
"""Time for rank 0 to notice the end of another rank, which may be the cause of an error here."""
_LOG = logging.getLogger("exl.load")


def main(arguments: list[str]) -> None:
    """`arguments`: numbers of the sockets for messages and for reports, the rank, and whether it
    may start the GPU of that number."""
    gc.disable()  # until the model is loaded: imports make no garbage
    messages_fd, reports_fd, rank, may_use_gpu = map(int, arguments)
    messages = Connection(messages_fd)
    reports = Reports(Connection(reports_fd), leader=os.getppid())
    if may_use_gpu:
        _start_gpu(rank)
    run(reports, lambda: _follow_on_host(messages, reports, rank))


def run(reports: Reports, follow: Callable[[], None]) -> NoReturn:
    """Ends the process after `follow`, or reports why it cannot go on."""
    try:
        follow()
    except EOFError:
        reports.lost()
    except ExlError as error:
        if isinstance(error, RankError):
            # An exchange also fails if another rank has ended. Rank 0 reports that one, and ends
            # this process meanwhile.
            time.sleep(CAUSE_S)
        reports.failed(str(error), error.exit_code)
        os._exit(error.exit_code)
    except BaseException as error:  # noqa: BLE001 - the process ends, and rank 0 reports it
        reports.failed(f"{type(error).__name__}: {error}", ExlError.exit_code)
        os._exit(ExlError.exit_code)
    os._exit(0)  # without waiting for threads of the exchange


def _follow_on_host(messages: Connection, reports: Reports, own_rank: int) -> None:
    """A follower that rank 0 has started: its first message are its settings, or that its GPU may
    connect meanwhile."""
    settings = _Settings(messages, reports, own_rank)
    settings.start()
    from exl_core.parallel.exchange import GlooExchange
    from exl_core.parallel.peers import with_peers
    from exl_core.session.hosts import load_part, open_table
    from exl_core.session.load import options_of
    from exl_core.session.open import open_model
    from exl_core.session.ranks import digest_of

    found = settings.result()
    _LOG.debug("torch and others are imported")
    options = options_of(found["options"])
    rank = Rank(found["rank"], found["options"]["tensor_parallel"])
    files = open_model(found["path"])
    ops = open_table(options, rank, options.threads or 1)  # rank 0 has chosen them
    connecting = _connecting(messages, rank, ops, settings.connection)
    part = load_part(files, options, rank, ops)
    gc.enable()

    def join(sample_ids: tuple[int, ...]) -> RankTransformer:
        exchange: Exchange = GlooExchange.in_folder(Path(found["folder"]), rank)
        if connecting is not None:
            exchange = connecting.exchange.result()
        exchange, _ = with_peers(exchange, part.ops, part.config, options.exchange)
        return part.model(exchange, sample_ids)

    follow(messages, reports, digest_of(files), join, _load_unchanged)


class _Settings(threading.Thread):
    """Reads the settings, the first message, while the main thread imports torch: what concerns
    rank 0 holds from then on. `connection`: this rank's GPU, if it connects with the others
    meanwhile."""

    def __init__(self, messages: Connection, reports: Reports, rank: int) -> None:
        super().__init__(name="exl-settings", daemon=True)
        self.connection: Future[Communicator] | None = None
        self._rank = rank
        self._messages = messages
        self._reports = reports
        self._found: dict[str, Any] | None = None

    def result(self) -> dict[str, Any]:
        """Waits for them. EOFError if rank 0 has ended."""
        self.join()
        if self._found is None:
            raise EOFError
        return self._found

    def run(self) -> None:
        try:
            data = self._messages.recv_bytes()
            if data[:1] == CONNECT:
                self.connection = self._connect(data[1], data[2:])
                data = self._messages.recv_bytes()
        except (EOFError, OSError):
            return
        found = json.loads(data)
        if found["has_log"]:
            _log_to_stderr(found["rank"])
        reports = self._reports
        reports.set_rank(found["rank"])
        reports.folder = found["folder"]
        reports.kills_leader = found["options"]["is_command"]
        if reports.kills_leader and reports.rank == 1:
            reports.on_hang = partial(_complain, found["options"]["tensor_parallel"])
        _LOG.debug("has its settings")
        self._found = found

    def _connect(self, num_ranks: int, identity: bytes) -> Future[Communicator]:
        from exl_core.parallel.nccl_library import Communicator, load

        rank = Rank(self._rank, num_ranks)
        return in_background(lambda: Communicator(load(is_first=True), identity, rank, self._rank))


def _start_gpu(index: int) -> None:
    """Starts a GPU on a thread, while torch is imported. A failure is found when the GPU is
    opened."""
    from exl_core.ops.backends.cuda.driver import start_driver

    threading.Thread(target=start_driver, args=(index,), daemon=True).start()


def _connecting(
    messages: Connection, rank: Rank, ops: OpTable, made: Future[Communicator] | None = None
) -> Connecting | None:
    """Begins to connect a GPU with those of the other ranks, while weights are read; None on the
    CPU. Rank 0 sends the id for it before any message, unless it connects already (`made`)."""
    if ops.device.type != "cuda":
        return None
    from exl_core.parallel.nccl import Connecting
    from exl_core.parallel.nccl_library import ID_BYTES

    identity = b"" if made is not None else messages.recv_bytes(ID_BYTES)
    return Connecting(
        lambda: identity, rank, ops.device, in_order=ops.is_batch_invariant, made=made
    )


def _log_to_stderr(rank: int) -> None:
    """Shows the phases of the load, at rank 0's request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(created).3f rank {rank}: %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.DEBUG)


def _load_unchanged(digest: str, folder: Path, model: RankTransformer) -> Adapter:
    """Reads an adapter from the folder from which rank 0 has read it."""
    from exl_core.lora.adapter import load_adapter

    adapter = load_adapter(folder, model)
    if adapter.digest != digest:
        raise RankError("the adapter has changed since rank 0 read it", where=folder)
    return adapter


def _complain(num_ranks: int, what: str) -> None:
    """Says what is wrong with rank 0, which is about to be killed and cannot say it itself."""
    with suppress(OSError):
        os.write(2, f"exl: error: rank 0 of {num_ranks} {what}\n".encode())


def follow(
    messages: Connection,
    reports: Reports,
    digest: str,
    join: Callable[[tuple[int, ...]], RankTransformer],
    load: LoadAdapter,
) -> None:
    """Runs rank 0's messages until END. `digest` stands for the files that this rank has loaded;
    `join` connects it with the others, and gets the token ids on which key smoothing is measured;
    `load` reads an adapter."""
    from exl_core.parallel.wire import Operation, numbers_of

    reports.loaded(digest)
    first = receive(messages, sequence=0)
    if first.header.operation == Operation.END:
        return
    reports.joined()
    follower = Follower(join(tuple(numbers_of(first).tolist())), load)
    for sequence in count(1):
        message = receive(messages, sequence)
        if message.header.operation == Operation.END:
            follower.finish()
            return
        follower.run(message)


def follow_job(
    job: Launched,
    options_of: Callable[[], tuple[ModelFiles, LoadOptions]],
    adapters: Sequence[Path],
    on_loss: Callable[[str], None],
) -> NoReturn:
    """Serves rank 0 as another process of the job, until rank 0 ends. Never returns.

    `options_of` opens the model: an error is rank 0's to report. `adapters` are the folders of this
    host's copies of the adapters: rank 0 names them by their contents. `on_loss` is called if rank
    0 ends without a word, or hangs.
    """
    from exl_core.parallel.peers import with_peers
    from exl_core.parallel.rendezvous import Meeting
    from exl_core.session.hosts import (
        check_job,
        connecting_in,
        job_digest,
        open_table,
        part_of,
        threads_of_job,
    )

    meeting = Meeting(job)
    ends = meeting.follow()
    reports = Reports(ends.reports)
    reports.set_rank(job.rank)
    reports.on_end = reports.on_hang = on_loss
    _handle_stop_signals(reports, has_leader=meeting.grid.host_of(job.rank) == 0)

    def load(digest: str, folder: Path, model: RankTransformer) -> Adapter:
        from exl_core.lora.adapter import contents_digest, load_adapter

        for own in adapters:
            if contents_digest(own) == digest:
                return load_adapter(own, model)
        raise RankError(
            "no adapter of this process is the one of rank 0",
            expected=f"a copy of {folder} as --lora",
            got=", ".join(map(str, adapters)) or "none",
        )

    def work() -> None:
        files, options = options_of()
        check_job(options, job)
        rank = meeting.grid.rank_in_host(job.rank)
        ops = open_table(options, rank, threads_of_job(options, job))
        connecting = connecting_in(meeting, ops)
        part = part_of(meeting, files, options, ops)

        def join(sample_ids: tuple[int, ...]) -> HostTransformer:
            exchange = meeting.connect()
            if connecting is not None:
                exchange = connecting.exchange.result()
            exchange, _ = with_peers(exchange, ops, part.config, options.exchange)
            return part.model(exchange, sample_ids, meeting.hops)

        follow(ends.messages, reports, job_digest(files, options), join, load)

    run(reports, work)


def _handle_stop_signals(reports: Reports, *, has_leader: bool) -> None:
    """On rank 0's host torchrun stops rank 0 too, which completes its replies and ends the group.
    On other hosts a stopped rank reports it to rank 0."""

    def leave(number: int) -> None:
        reports.failed(f"stopped by {signal.Signals(number).name}", 1)
        os._exit(1)

    def stop(number: int, _frame: FrameType | None) -> None:
        # On a thread, as the interrupted code may be sending a report.
        threading.Thread(target=leave, args=(number,), daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if has_leader else stop)


if __name__ == "__main__":
    main(sys.argv[1:])
