"""Server-sent events, and cancellation when a client disconnects.

A client that disconnects, during a stream or before its answer, cancels its work.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from exl_cli.server.errors import ApiError, shaped, to_json
from exl_cli.server.limits import PIPE
from exl_cli.server.record import record_of
from exl_cli.server.service import failure_of
from exl_core.errors import ExlError
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result

T = TypeVar("T")
Event = dict[str, object] | bytes
PING_S = 15.0
"""Seconds without an event after which a comment is sent. Proxies close a connection that is silent
for 60 s by default, and a long prompt or a queue may take longer."""


@dataclass(frozen=True, slots=True)
class Framing:
    """How the events of a stream are written.

    has_names   each event is preceded by its type, as in Anthropic's API
    has_prefix  events are server-sent events; otherwise lines of JSON, which have no comments
    end         what follows the last event
    """

    media_type: str = "text/event-stream"
    has_names: bool = False
    has_prefix: bool = True
    end: bytes = b""

    @property
    def ping(self) -> bytes:
        """Comment that clients ignore. "": the framing has none."""
        return b": ping\n\n" if self.has_prefix else b""

    def frame(self, event: Event) -> bytes:
        data = event if isinstance(event, bytes) else to_json(event)
        if not self.has_prefix:
            return data + b"\n"
        if self.has_names and not isinstance(event, bytes):
            return b"event: " + str(event["type"]).encode() + b"\ndata: " + data + b"\n\n"
        return b"data: " + data + b"\n\n"


EVENTS = Framing(end=b"data: [DONE]\n\n")
EVENTS_WITHOUT_END = Framing()
NAMED_EVENTS = Framing(has_names=True)
JSON_LINES = Framing("application/x-ndjson", has_prefix=False)


class Pipe(Protocol):
    """Writes pieces of a body after its head. A paused pipe still accepts pieces, and buffers them
    until `drain` returns."""

    @property
    def is_paused(self) -> bool: ...
    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...


class EventStream(Protocol):
    """Source of events: at the beginning of a stream, for each result, and after all jobs ended."""

    @property
    def framing(self) -> Framing: ...
    @property
    def jobs(self) -> Sequence[AsyncJob]: ...
    def begin(self) -> Iterable[Event]: ...
    def on_result(self, number: int, result: Result, /) -> Iterable[Event]: ...
    def end(self) -> Iterable[Event]: ...


@runtime_checkable
class ShapesFailures(Protocol):
    """Stream whose errors are events of its own."""

    def failure(self, error: ApiError, /) -> Event: ...


class ClientGoneError(Exception):
    """The client has disconnected."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`. Cancels it and raises ClientGoneError if the client disconnects."""
    return await _first(asyncio.create_task(work), request.receive)


class TextEvents:
    """Serializer of events that differ in one text. The JSON around the text is made only once."""

    def __init__(self, make: Callable[[str], object]) -> None:
        place = uuid.uuid4().hex
        self._before, _, self._after = to_json(make(place)).partition(to_json(place))

    def of(self, text: str) -> bytes:
        """`to_json` of the event with this text."""
        return self._before + to_json(text) + self._after


class EventStreamResponse(Response):
    """Response that sends the events and the end of their framing. It always closes the stack at
    its end."""

    def __init__(self, events: EventStream, stack: AsyncExitStack) -> None:
        self.status_code = 200
        self.media_type = events.framing.media_type
        self.background = None
        # Tells proxies not to buffer events.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            try:
                await _first(asyncio.create_task(self._write(scope, send)), receive)
            except ClientGoneError:
                record_of(scope).reason = "the client left"

    async def _write(self, scope: Scope, send: Send) -> None:
        pipe: Pipe = scope.get("state", {}).get(PIPE) or _AsgiPipe(send)
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        framing = self._events.framing
        last, bug = framing.end, None
        try:
            await _StreamWriter(self._events, pipe).run()
        except Exception as error:  # noqa: BLE001 - sent to the client; a bug is raised again below
            failure = failure_of(error)
            record_of(scope).reason = failure.message
            event: Event = shaped(failure, scope["path"])
            if isinstance(self._events, ShapesFailures):
                event = self._events.failure(failure)
            last = framing.frame(event)
            bug = None if isinstance(error, ApiError | ExlError) else error
        await pipe.drain()
        await send({"type": "http.response.body", "body": last, "more_body": False})
        if bug is not None:
            raise bug  # uvicorn logs it


class _StreamWriter:
    """Writes events as results arrive, directly in the callback of the job, without a task switch.

    While the client does not keep up, results stay in their jobs, unserialized.
    """

    def __init__(self, events: EventStream, pipe: Pipe) -> None:
        self._events = events
        self._frame = events.framing.frame
        self._ping = events.framing.ping
        self._pipe = pipe
        self._num_written = 0
        self._is_done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        self._write(self._events.begin())
        for job in self._events.jobs:
            job.listen(self._forward)
        while True:
            await self._pipe.drain()
            self._is_done = asyncio.get_running_loop().create_future()
            self._forward()
            await self._wait()
            if self._is_done.result():  # False: the pipe is paused, because the client is slow
                break
        self._write(self._events.end())

    async def _wait(self) -> None:
        """Wait until all jobs have ended or the pipe is paused. Keep a silent connection open."""
        while not self._is_done.done():
            before = self._num_written
            await asyncio.wait([self._is_done], timeout=PING_S)
            is_silent = self._num_written == before and not self._is_done.done()
            if is_silent and self._ping:
                self._pipe.write(self._ping)
                await self._pipe.drain()

    def _forward(self) -> None:
        if self._is_done.done():
            return
        try:
            jobs = self._events.jobs
            for number, job in enumerate(jobs):
                while (result := job.take()) is not None:
                    self._write(self._events.on_result(number, result))
                    if self._pipe.is_paused:
                        self._is_done.set_result(False)
                        return
            if all(job.has_ended for job in jobs):
                self._is_done.set_result(True)
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._is_done.set_exception(error)

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            self._num_written += 1
            self._pipe.write(self._frame(event))


class _AsgiPipe:
    """Pipe over ASGI's `send`, for any server."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: deque[bytes] = deque()

    @property
    def is_paused(self) -> bool:
        return bool(self._held)

    def write(self, data: bytes) -> None:
        self._held.append(data)

    async def drain(self) -> None:
        while self._held:
            body = self._held.popleft()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def closing(stack: AsyncExitStack, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Result of `make`. Closes the stack if it fails."""
    try:
        return await make()
    except BaseException:
        await stack.aclose()
        raise


async def _first(work: asyncio.Task[T], receive: Receive) -> T:
    """Result of `work`. Raises ClientGoneError if the client disconnects first."""
    tasks: list[asyncio.Task[Any]] = [work, asyncio.create_task(_disconnected(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGoneError
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
