"""Runs the server in a process: socket, signals, and limits on slow and broken clients."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from exl_cli.server.errors import ApiError, to_json
from exl_cli.server.limits import MAX_HEAD_BYTES, PIPE, Limits
from exl_cli.server.log_limit import limit_log_lines
from exl_core.constrain import trial
from exl_core.errors import RequestError

_KEEP_ALIVE_S = 30
_LINGER_S = 1.0
_CODE_INTERRUPTED = 130


class Server(uvicorn.Server):
    """The first signal ends the server after the running replies, the second ends it at once.

    `announce` is called once clients can connect.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Unlike uvicorn's method, this one does not raise the signal again: a server that ended on
        # request has not failed.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        previous = {one: signal.signal(one, self.handle_exit) for one in handled}
        try:
            yield
        finally:
            for one, handler in previous.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.should_exit:
            os._exit(_CODE_INTERRUPTED)  # without waiting for the current step of the engine
        self.should_exit = True
        # A constraint may be compiled for seconds, and its reply has not begun. `stop` runs on a
        # thread, because the interrupted code may hold a lock that it needs.
        threading.Thread(target=trial.stop, name="exl-stop-trials", daemon=True).start()


def make_server(
    app: FastAPI, limits: Limits, announce: Callable[[], None] = lambda: None
) -> Server:
    class Protocol(LimitedProtocol):
        header_s = limits.header_s
        send_s = limits.send_s

    limit_log_lines(logging.getLogger("uvicorn.error"))
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=1024,
    )
    return Server(config, announce)


class _Pieces:
    """Writes pieces of a body with the framing that h11 would produce.

    h11's own path, with its state machines of both sides, takes longer than all work of the
    application for an event.
    """

    def __init__(self, protocol: H11Protocol) -> None:
        self._protocol = protocol

    @property
    def is_paused(self) -> bool:
        return self._protocol.flow.write_paused

    @property
    def chunk_bytes_left(self) -> int:
        """Bytes that the client has announced for the current chunk of its body. h11 knows them but
        does not publish them."""
        left: int = getattr(self._protocol.conn._reader, "_bytes_in_chunk", 0)
        return left

    def write(self, data: bytes) -> None:
        transport = self._protocol.transport
        if not transport.is_closing():
            is_chunked = self._protocol.conn.their_http_version == b"1.1"
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    async def drain(self) -> None:
        await self._protocol.flow.drain()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Port 0 selects any free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as undo:
            listening = undo.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            undo.pop_all()
    except (OSError, UnicodeError) as error:
        raise RequestError(
            "cannot listen on this address",
            where=f"--host {host} --port {port}",
            got=error,
            next_step="Use another --port; 0 selects a free one.",
        ) from error
    return listening


def url_of(listening: socket.socket) -> str:
    host, port, *_ = listening.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class LimitedProtocol(H11Protocol):
    """HTTP protocol with time limits: `header_s` seconds until the head of a request has arrived,
    `send_s` seconds until the client has read the sent data.

    Input that is not HTTP is answered with an error in OpenAI's format.
    """

    header_s = 10.0
    send_s = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, PIPE: _Pieces(self)}
        transport.set_write_buffer_limits(0)  # pause as soon as the kernel's buffer is full
        self._send_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        self._unwatch_sending()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Abort: `close` would wait for the client.
        self._send_timer = self.loop.call_later(self.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._unwatch_sending()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        status = 400
        if isinstance(error, h11.RemoteProtocolError):
            status = error.error_status_hint
        answer = ApiError(status, msg, code="invalid_http")
        self._unwatch_head()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # wakes a handler that waits for the rest of the body
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(answer)
        else:  # an answer is being sent
            self.transport.close()

    def _watch_head(self) -> None:
        """Start the timer for the head of a request, on a new connection too, or stop it."""
        is_waiting = (
            not self._is_refused
            and self.conn.their_state is h11.IDLE
            and (self.cycle is None or bool(self.conn.trailing_data[0]))
        )
        if not is_waiting:
            self._unwatch_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_s, self._too_slow)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _unwatch_sending(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            message = f"the head of the request did not arrive within {self.header_s:g} s"
            if self.conn.trailing_data[0]:
                self._refuse(ApiError(408, message, code="request_timeout"))
            else:
                self.transport.close()

    def _refuse(self, answer: ApiError) -> None:
        """Send the answer, and close the connection a moment later. A client that is still writing
        would not read the answer after an immediate close."""
        self._is_refused = True
        body = to_json(answer.body)
        headers: list[Any] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=answer.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            sent = self.conn.send(event)
            if sent:
                self.transport.write(sent)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
