"""The processes of the other ranks, as rank 0 sees them: start, messages, failures, end.

Each follower has two socket pairs, which it inherits: one for messages from rank 0, and one on
which it reports that it lives, that it has loaded, or why it ends. Nothing listens on a port for
them. A thread watches the reports. A follower that ends, reports an error or falls silent ends the
group: all followers are killed, which also ends every exchange that rank 0 waits in, and `failure`
says which rank it was and why. Groups are never repaired.

If rank 0 ends in any way, its ends of the sockets close, and the followers end themselves.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event, Lock, Thread

from exl_core.errors import RankError
from exl_core.parallel.exchange import Exchange, GlooExchange
from exl_core.parallel.plan import Rank
from exl_core.parallel.wire import Header, Message, Operation

SILENCE_S = 3.5
"""A follower that reports nothing for so long hangs. It reports twice a second."""
LOADING_SILENCE_S = 60.0
"""The same until it has loaded: imports and large files may hold the interpreter."""
END_S = 2.0
"""Time for a follower to leave by itself."""
REPORT_LIMIT_BYTES = 1 << 16
BEAT, LOADED, FAILED = b"B", b"L", b"F"


class _Follower:
    """One process, rank 0's ends of its sockets, and what it has reported."""

    def __init__(self, rank: int, module: str, settings: Mapping[str, object]) -> None:
        self.rank = rank
        self.digest: str | None = None
        self.heard_s = time.monotonic()
        ends = [socket.socketpair() for _ in range(2)]
        inherited = [theirs.detach() for _, theirs in ends]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for rank 0
            )
        finally:
            for fd in inherited:
                socket.socket(fileno=fd).close()
        self.messages, self.reports = (Connection(ours.detach()) for ours, _ in ends)
        self.messages.send_bytes(json.dumps(dict(settings)).encode())

    @property
    def is_loaded(self) -> bool:
        return self.digest is not None

    def end_of_process(self) -> str:
        """How the process ended, for a message. It is killed if it has not."""
        try:
            code = self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Followers:
    """All ranks but rank 0. `close` ends them; `failure` is set if they end before."""

    def __init__(
        self, num_ranks: int, module: str, settings_of: Callable[[int], Mapping[str, object]]
    ) -> None:
        """Starts `python -m module` for every rank from 1 on, with `settings_of(rank)`, which must
        be JSON, as its first message."""
        self.num_ranks = num_ranks
        self.failure: RankError | None = None
        self._failed = Event()
        self._loaded = Event()
        self._is_closing = False
        self._sequence = 0
        self._lock = Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="exl-ranks-")
        self._all: list[_Follower] = []
        try:
            for rank in range(1, num_ranks):
                settings = {"folder": self._folder.name, **settings_of(rank)}
                self._all.append(_Follower(rank, module, settings))
        except BaseException:
            self.close()
            raise
        self._watcher = Thread(target=self._watch, name="exl-ranks", daemon=True)
        self._watcher.start()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks from 1 on."""
        return tuple(one.process.pid for one in self._all)

    def meet(self, digest: str) -> Exchange:
        """Waits until all followers have loaded, and connects the ranks for their exchanges.

        `digest` stands for the files that rank 0 has read. RankError if a follower fails or has
        read others.
        """
        self._loaded.wait()
        self.check()
        for one in self._all:
            if one.digest != digest:
                self._fail(one.rank, "has read other model files than rank 0")
        self.check()
        self.send(Message(Header(Operation.JOIN), b""))
        try:
            exchange = GlooExchange(Path(self._folder.name), Rank(0, self.num_ranks))
        except RankError as error:
            raise self.cause(error) from error
        self._folder.cleanup()
        return exchange

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

    def check(self) -> None:
        """Raises RankError if the group has ended."""
        if self.failure is not None:
            again = RankError(self.failure.what)  # every caller's traceback is its own
            again.exit_code = self.failure.exit_code
            raise again
        if self._is_closing:
            raise RankError("the ranks of this model have ended", next_step="Load it again.")

    def cause(self, error: RankError) -> RankError:
        """The failure behind an error in an exchange, which may be noticed a moment later."""
        self._failed.wait(END_S)
        if self.failure is None:
            self._fail(0, str(error))
        assert self.failure is not None, "`_fail` has set it"
        return self.failure

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
            with contextlib.suppress(OSError):
                one.messages.send_bytes(data)
        until = time.monotonic() + END_S
        for one in self._all:
            try:
                one.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
        self._failed.set()
        self._loaded.set()
        self._folder.cleanup()

    def _fail(self, rank: int, what: str, exit_code: int | None = None) -> None:
        """Ends the group with this cause; the first one counts."""
        with self._lock:
            if self.failure is not None or self._is_closing:
                return
            self.failure = RankError(f"rank {rank} of {self.num_ranks} {what}")
            if exit_code is not None:
                self.failure.exit_code = exit_code
        for one in self._all:
            one.kill()
        self._failed.set()
        self._loaded.set()

    def _watch(self) -> None:
        """Reads reports until the group ends. Runs on a thread of its own."""
        waited_s = time.monotonic()
        while not self._is_closing and self.failure is None:
            for ready in wait([one.reports for one in self._all], timeout=0.5):
                follower = next(one for one in self._all if one.reports is ready)
                self._hear(follower)
            now = time.monotonic()
            if now - waited_s > SILENCE_S / 2:  # this process was suspended, others may have been
                for one in self._all:
                    one.heard_s = now
            waited_s = now
            for one in self._all:
                limit = SILENCE_S if one.is_loaded else LOADING_SILENCE_S
                if now - one.heard_s > limit:
                    self._fail(one.rank, f"has not answered for {limit:g} s")
        for one in self._all:
            one.reports.close()

    def _hear(self, follower: _Follower) -> None:
        try:
            report = follower.reports.recv_bytes(REPORT_LIMIT_BYTES)
        except (EOFError, OSError):
            if not self._is_closing:
                self._fail(follower.rank, follower.end_of_process())
            return
        follower.heard_s = time.monotonic()
        kind, text = report[:1], report[1:].decode("utf-8", "replace")
        if kind == LOADED:
            follower.digest = text
            if all(one.is_loaded for one in self._all):
                self._loaded.set()
        elif kind == FAILED:
            code, _, line = text.partition(" ")
            self._fail(follower.rank, f"failed: {line}", int(code))
