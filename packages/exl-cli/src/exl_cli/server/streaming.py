"""Server-sent events, and clients that leave.

A client that has gone, in the middle of a stream or before its answer, takes its work with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from exl_cli.server.errors import to_json
from exl_cli.server.service import failure_of

T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`, which is dropped once the client has left."""
    return await _first(asyncio.create_task(work), request.receive)


class EventStream(Response):
    """`events` as JSON, and `[DONE]`. The stack is closed at the end, whatever that was."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[dict[str, object]], stack: AsyncExitStack, send_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        # No proxy is to keep events back.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events
        self._stack = stack
        self._send_s = send_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            try:
                await _first(asyncio.create_task(self._write(send)), receive)
            except (ClientGoneError, TimeoutError):
                return

    async def _write(self, send: Send) -> None:
        async def put(data: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(self._send_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await put(b"data: " + to_json(event) + b"\n\n")
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - `failure_of` raises again what is a bug
            await put(b"data: " + to_json(failure_of(error).body) + b"\n\n", more=False)
            return
        await put(b"data: [DONE]\n\n", more=False)


async def closing(stack: AsyncExitStack, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `make` gives; if it fails, the stack is closed."""
    try:
        return await make()
    except BaseException:
        await stack.aclose()
        raise


async def _first(work: asyncio.Task[T], receive: Receive) -> T:
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGoneError
    finally:
        work.cancel()
        leaving.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
