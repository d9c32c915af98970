"""Server-sent events, and clients that leave.

A client that has gone, in the middle of a stream or before its answer, takes its work with it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from exl_cli.server.errors import to_json
from exl_cli.server.service import failure_of

T = TypeVar("T")
Event = dict[str, object] | bytes
Put = Callable[[bytes], Awaitable[None]]
PUT = "exl.put"
"""Where the state of a request's scope has a `Put` for pieces of a body that has begun, if its
server is quicker than by `send`."""


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`, which is dropped once the client has left."""
    return await _first(asyncio.create_task(work), request.receive)


class TextEvents:
    """Events that differ in one text: what stands around it is written as JSON only once."""

    def __init__(self, make: Callable[[str], object]) -> None:
        place = uuid.uuid4().hex
        self._before, _, self._after = to_json(make(place)).partition(to_json(place))

    def of(self, text: str) -> bytes:
        """What `to_json` of the event with this text gives."""
        return self._before + to_json(text) + self._after


class EventStream(Response):
    """`events`, as JSON or as what becomes JSON, and `[DONE]`. The stack is closed at the end,
    whatever that was."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Event], stack: AsyncExitStack) -> None:
        self.status_code = 200
        self.background = None
        # No proxy is to keep events back.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            try:
                await _first(asyncio.create_task(self._write(scope, send)), receive)
            except ClientGoneError:
                return

    async def _write(self, scope: Scope, send: Send) -> None:
        async def put_slowly(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        put: Put = scope.get("state", {}).get(PUT, put_slowly)
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        last = b"[DONE]"
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await put(_told(event if isinstance(event, bytes) else to_json(event)))
        except Exception as error:  # noqa: BLE001 - `failure_of` raises again what is a bug
            last = to_json(failure_of(error).body)
        await put_slowly(_told(last), more=False)


def _told(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"


async def closing(stack: AsyncExitStack, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `make` gives; if it fails, the stack is closed."""
    try:
        return await make()
    except BaseException:
        await stack.aclose()
        raise


async def _first(work: asyncio.Task[T], receive: Receive) -> T:
    """The outcome of `work`, unless the client leaves before."""
    tasks: list[asyncio.Task[Any]] = [work, asyncio.create_task(_left(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGoneError
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
