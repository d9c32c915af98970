"""The processes of the other ranks, as rank 0 sees them: start, messages, failures, end.

Each follower has two sockets: one for messages from rank 0, and one on which it reports that it
lives, that it has loaded, or why it ends. Processes that rank 0 starts inherit socket pairs, and
nothing listens on a port for them. Those of several hosts have connected (`rendezvous.py`). A
thread watches the reports. A follower that ends, reports an error or falls silent ends the group:
all followers are killed, which also ends every exchange that rank 0 waits in, and `failure` says
which rank it was and why. Groups are never repaired.

If rank 0 ends in any way, its ends of the sockets close, and the followers end themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TypeVar

from exl_core.errors import RankError
from exl_core.parallel.background import in_background
from exl_core.parallel.exchange import Exchange, GlooExchange
from exl_core.parallel.follower import BEAT, DESERTED, DONE, FAILED, FAREWELL, LOADED
from exl_core.parallel.liveness import BEAT_S, SILENCE_S, RankWatch, Watchdog
from exl_core.parallel.nccl_library import Communicator
from exl_core.parallel.plan import Rank
from exl_core.parallel.processes import RankProcess, start
from exl_core.parallel.wire import Header, Message, Operation, join_message

T = TypeVar("T")
END_S = 2.0
"""Time for a follower to leave by itself."""
_EXIT_S = 1.5
"""Time for a follower whose connection has closed to end. The driver frees the memory of its GPU
first, and how it ended is known only then."""
CHECK_S = 0.1
"""Time between two looks at the followers while all ranks join."""
REPORT_LIMIT_BYTES = 1 << 16
WATCHDOG_S = SILENCE_S + BEAT_S
"""Time after which rank 0's own watchdog ends it. The other ranks give it up a little earlier."""


class Follower:
    """Rank 0's ends of a follower's sockets, and what it has reported. `place`: where its process
    runs, for messages, if another program has started it."""

    def __init__(
        self,
        rank: int,
        messages: Connection,
        reports: Connection,
        place: str = "",
        process: int | None = None,
    ) -> None:
        self.rank = rank
        self.messages = messages
        self.reports = reports
        self.place = place
        self.digest: str | None = None
        self.watch = RankWatch(process)

    @property
    def is_loaded(self) -> bool:
        return self.digest is not None

    def end_of_process(self) -> str:
        """How the process ended, for a message. It is killed if it has not."""
        return "has ended" if not self.place else f"has ended ({self.place})"

    def leave(self, until_s: float) -> None:
        """Waits for the process, which has been told to leave, and kills it after that time."""

    def say(self, word: bytes) -> None:
        """Sends a beat or a last word. A follower that has ended is noticed by its socket."""
        with contextlib.suppress(OSError):
            self.reports.send_bytes(word)

    def kill(self) -> None:
        """Ends the process: it ends itself when its sockets do."""
        self.say(FAREWELL)
        for end in (self.messages, self.reports):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as one:
                one.shutdown(socket.SHUT_RDWR)


class _OwnProcess(Follower):
    """A follower in a process that rank 0 has started."""

    def __init__(self, started: RankProcess, settings: Mapping[str, object]) -> None:
        self._started = started
        self.process = started.process
        super().__init__(
            started.rank, started.messages, started.reports, process=started.process.pid
        )
        started.configure(settings)

    def end_of_process(self) -> str:
        try:
            code = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"

    def leave(self, until_s: float) -> None:
        if not self.is_loaded:  # it has nothing to complete
            self.kill()
            return
        try:
            self.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._started.kill()


class Group:
    """All ranks but rank 0. `close` ends them; `failure` is set if they end before.

    `connect` joins the other ranks' exchanges once all have loaded; it gets `has_failed`.
    `watchdog` ends this process if it hangs.
    """

    def __init__(
        self,
        followers: Sequence[Follower],
        connect: Callable[[Callable[[], bool]], Exchange],
        watchdog: Watchdog | None = None,
    ) -> None:
        self.num_ranks = len(followers) + 1
        self.failure: RankError | None = None
        self.on_failure: Callable[[], None] | None = None
        """Ends exchanges that the end of the followers does not end."""
        self.on_close: Callable[[float], None] | None = None
        """Frees what these exchanges hold. Gets the longest time to wait for it, in seconds."""
        self.nccl_id: Future[bytes] | None = None
        """With it the ranks' GPUs connect; None: they have none, or connect already."""
        self.connection: Future[Communicator] | None = None
        """Rank 0's GPU, if it has begun to connect with the others while they started."""
        self._connect = connect
        self._watchdog = watchdog
        self._failed = Event()
        self._loaded = Event()
        self._has_joined = False
        self._is_closing = False
        self._sequence = 0
        self._lock = Lock()
        self._all = followers
        self._watcher = Thread(target=self._watch, name="exl-ranks", daemon=True)
        self._watcher.start()

    def meet(self, digest: str, sample_ids: Sequence[int]) -> Exchange:
        """Waits until all followers have loaded, and connects the ranks for their exchanges.

        `digest` stands for the files that rank 0 has read. RankError if a follower fails or has
        read others. `sample_ids`: token ids of the text on which key smoothing is measured.
        """
        self._loaded.wait()
        self.check()
        for one in self._all:
            if one.digest != digest:
                self._fail(one.rank, "has read other model files than rank 0")
        self.check()
        self.send(join_message(sample_ids))
        self._has_joined = True
        self._feed_watchdog()  # the next beat may be half a second away
        return self.wait_for(in_background(lambda: self._connect(self.has_failed)))

    def wait_for(self, joining: Future[T]) -> T:
        """The result of a connection with the followers. RankError if the group ends meanwhile,
        even if the connection goes on waiting for a follower that has ended."""
        while joining not in futures.wait([joining], CHECK_S).done:
            self.check()
        try:
            return joining.result()
        except RankError as error:
            raise self.cause(error) from error

    def send_bytes(self, data: bytes) -> None:
        """Sends data that the followers read before the first message."""
        for one in self._all:
            with contextlib.suppress(OSError):  # the watcher notices a follower that has ended
                one.messages.send_bytes(data)

    def send(self, message: Message) -> None:
        """Sends a message to every follower. RankError if the group has ended."""
        self.check()
        data = message.packed(self._sequence)
        self._sequence += 1
        for one in self._all:
            try:
                one.messages.send_bytes(data)
            except OSError as error:
                raise self.cause(RankError(f"rank {one.rank} has ended", got=error)) from error

    def has_failed(self) -> bool:
        return self.failure is not None

    def check(self) -> None:
        """Raises RankError if the group has ended."""
        if self.failure is not None:
            raise self._copied(self.failure)
        if self._is_closing:
            raise RankError("the ranks of this model have ended", next_step="Load it again.")

    def cause(self, error: RankError) -> RankError:
        """The failure behind an error in an exchange, which may be noticed a moment later."""
        self._failed.wait(END_S)
        if self.failure is None:
            self._fail(0, str(error))
        assert self.failure is not None, "`_fail` has set it"
        return self._copied(self.failure)

    @staticmethod
    def _copied(failure: RankError) -> RankError:
        """An error to raise. Every caller's traceback is its own: the group stays until the program
        ends, and that of its own error would keep the model with it."""
        again = RankError(failure.what)
        again.exit_code = failure.exit_code
        return again

    def abandon(self, why: str) -> None:
        """Ends the group after a failure of rank 0 in the middle of a pass."""
        self._fail(0, why)

    def close(self) -> None:
        """Ends all followers, and waits for them. May be called again."""
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
        if was_closing:
            return
        data = Message(Header(Operation.END), b"").packed(self._sequence)
        for one in self._all:
            one.say(DONE)
            with contextlib.suppress(OSError):
                one.messages.send_bytes(data)
        until_s = time.monotonic() + END_S
        for one in self._all:
            one.leave(until_s)
        if self.on_close is not None:
            self.on_close(END_S)
        self._failed.set()
        self._loaded.set()

    def wait_for_end(self) -> RankError | None:
        """Waits until the group ends. The failure, or None if it was closed."""
        self._failed.wait()
        return self.failure

    def _fail(self, rank: int, what: str, exit_code: int | None = None) -> None:
        """Ends the group with this cause; the first one counts."""
        with self._lock:
            if self.failure is not None or self._is_closing:
                return
            self.failure = RankError(f"rank {rank} of {self.num_ranks} {what}")
            if exit_code is not None:
                self.failure.exit_code = exit_code
        if self.on_failure is not None:
            self.on_failure()
        for one in self._all:
            one.kill()
        self._failed.set()
        self._loaded.set()

    def _watch(self) -> None:
        """Reads reports and beats until the group ends. Runs on a thread of its own."""
        said_s = -BEAT_S
        while not self._is_closing and self.failure is None:
            now = time.monotonic()
            if now - said_s >= BEAT_S:
                self._beat()
                said_s = now
            for ready in wait([one.reports for one in self._all], said_s + BEAT_S - now):
                follower = next(one for one in self._all if one.reports is ready)
                self._hear(follower)
            for one in self._all:
                if one.watch.hangs():
                    place = f" ({one.place})" if one.place else ""
                    self._fail(one.rank, f"has not answered for {one.watch.limit_s:g} s{place}")
        if self._watchdog is not None:
            self._watchdog.set(0)  # `_feed_watchdog` does nothing from now on
        self._failed.wait()  # until the followers have been told
        for one in self._all:
            one.reports.close()

    def _beat(self) -> None:
        for one in self._all:
            one.say(BEAT)
        if self._has_joined:
            self._feed_watchdog()

    def _feed_watchdog(self) -> None:
        """Gives this process another `WATCHDOG_S`, unless the group has ended."""
        with self._lock:
            has_ended = self._is_closing or self.failure is not None
            if self._watchdog is not None and not has_ended:
                self._watchdog.set(WATCHDOG_S)

    def _hear(self, follower: Follower) -> None:
        try:
            report = follower.reports.recv_bytes(REPORT_LIMIT_BYTES)
        except (EOFError, OSError):
            if not self._is_closing:
                self._fail(follower.rank, follower.end_of_process())
            return
        follower.watch.heard()
        kind, text = report[:1], report[1:].decode("utf-8", "replace")
        if kind == LOADED:
            follower.digest = text
            follower.watch.has_loaded()
            if all(one.is_loaded for one in self._all):
                self._loaded.set()
        elif kind == FAILED:
            code, _, line = text.partition(" ")
            self._fail(follower.rank, f"failed: {line}", int(code))
        elif kind == DESERTED:  # this process was stopped, and goes on too late
            self._fail(0, text)


class Followers(Group):
    """Processes that rank 0 starts on its own machine."""

    def __init__(
        self,
        num_ranks: int,
        module: str,
        settings_of: Callable[[int], Mapping[str, object]],
        *,
        may_use_gpu: bool = False,
    ) -> None:
        """Processes of every rank from 1 on, new ones (`python -m module`) or those of
        `start_ahead`, with `settings_of(rank)`, which must be JSON, as their first message."""
        self._folder = tempfile.TemporaryDirectory(prefix="exl-ranks-")
        try:
            started = start(num_ranks, module, may_use_gpu=may_use_gpu)
        except BaseException:
            self._folder.cleanup()
            raise
        folder = {"folder": self._folder.name}
        self._processes = [_OwnProcess(one, {**folder, **settings_of(one.rank)}) for one in started]
        super().__init__(self._processes, self._joined)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks from 1 on."""
        return tuple(one.process.pid for one in self._processes)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def _joined(self, has_failed: Callable[[], bool]) -> Exchange:
        folder, rank = Path(self._folder.name), Rank(0, self.num_ranks)
        exchange = GlooExchange.in_folder(folder, rank, has_failed)
        self._folder.cleanup()
        return exchange
