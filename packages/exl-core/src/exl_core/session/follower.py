"""Process of one rank, started by `session/ranks.py` or by torchrun.

Loads the rank's part of the model, and then runs the passes that rank 0 describes until it ends.
Started by rank 0 it reads everything from two inherited sockets, whose numbers are its arguments.
It prints nothing, except if rank 0 hangs.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from exl_core.errors import ExlError, RankError
from exl_core.parallel.follower import Follower, Reports, receive

if TYPE_CHECKING:
    from types import FrameType

    from exl_core.model.adapters import Adapter
    from exl_core.parallel.follower import LoadAdapter
    from exl_core.parallel.hosts import HostTransformer
    from exl_core.parallel.model import RankTransformer
    from exl_core.session.load import LoadOptions
    from exl_core.session.open import ModelFiles
    from exl_core.settings import Launched


def main(arguments: list[str]) -> None:
    gc.disable()  # until the model is loaded: imports make no garbage
    messages = Connection(int(arguments[0]))
    reports = Reports(Connection(int(arguments[1])), leader=os.getppid())
    run(reports, lambda: _follow_on_host(messages, reports))


def run(reports: Reports, follow: Callable[[], None]) -> NoReturn:
    """Ends the process after `follow`, or reports why it cannot go on."""
    try:
        follow()
    except EOFError:
        reports.lost()
    except ExlError as error:
        reports.failed(str(error), error.exit_code)
        os._exit(error.exit_code)
    except BaseException as error:  # noqa: BLE001 - the process ends, and rank 0 reports it
        reports.failed(f"{type(error).__name__}: {error}", ExlError.exit_code)
        os._exit(ExlError.exit_code)
    os._exit(0)  # without waiting for threads of the exchange


def _follow_on_host(messages: Connection, reports: Reports) -> None:
    """A follower that rank 0 has started: its first message are its settings."""
    settings = json.loads(messages.recv_bytes())
    reports.set_rank(settings["rank"])
    reports.folder = settings["folder"]
    reports.kills_leader = settings["options"]["is_command"]
    if reports.kills_leader and reports.rank == 1:
        num_ranks = settings["options"]["tensor_parallel"]
        reports.on_hang = partial(_complain, num_ranks)
    _start_gpu(settings["gpu"])
    from exl_core.parallel.exchange import GlooExchange
    from exl_core.parallel.nccl import on_device
    from exl_core.parallel.peers import with_peers
    from exl_core.parallel.plan import Rank
    from exl_core.session.hosts import load_part
    from exl_core.session.load import options_of
    from exl_core.session.open import open_model
    from exl_core.session.ranks import digest_of

    options = options_of(settings["options"])
    rank = Rank(settings["rank"], settings["options"]["tensor_parallel"])
    files = open_model(settings["path"])
    part = load_part(files, options, rank, options.threads or 1)  # rank 0 has chosen them
    gc.enable()

    def join(sample_ids: tuple[int, ...]) -> RankTransformer:
        exchange = GlooExchange.in_folder(Path(settings["folder"]), rank)
        connected = on_device(exchange, part.ops.device)
        connected, _ = with_peers(connected, part.ops, part.config, options.exchange)
        return part.model(connected, sample_ids)

    follow(messages, reports, digest_of(files), join, _load_unchanged)


def _start_gpu(index: int | None) -> None:
    """Starts a GPU on a thread, while torch is imported; None: there is none. A failure is found
    when the GPU is opened."""
    if index is None:
        return
    from exl_core.ops.backends.cuda.driver import start_driver

    threading.Thread(target=start_driver, args=(index,), daemon=True).start()


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
    from exl_core.parallel.rendezvous import Meeting
    from exl_core.session.hosts import check_job, job_digest, part_of

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
        part = part_of(meeting, files, options)

        def join(sample_ids: tuple[int, ...]) -> HostTransformer:
            exchange = meeting.connect()
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
