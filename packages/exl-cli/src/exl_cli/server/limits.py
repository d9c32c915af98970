"""What stands before every request: who may ask, and how much, and how slowly.

Plain ASGI, so that a stream passes through untouched. The body is read whole, within its limits,
before anything else sees the request: the rest of the server never waits for a slow sender.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exl_cli.server import memory
from exl_cli.server.errors import ApiError
from exl_core.errors import RequestError

MAX_HEAD_BYTES = 64 * 1024

OPEN_PATHS = frozenset({"/", "/health"})
"""They hold no secret; the page asks for the key itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """body_bytes    largest body of a request
    header_s         time for the head of a request to arrive
    body_s           time for its body
    send_s           time for a client to take what was sent
    reply_s          time from the first pass of a reply to its end; it is cut there
    max_queue        most replies that wait beside those that run
    stall_s          after so long without a step /health says that generation is stuck
    """

    body_bytes: int = 8 * 1024 * 1024
    header_s: float = 10.0
    body_s: float = 30.0
    send_s: float = 60.0
    reply_s: float = 1800.0
    max_queue: int = 256
    stall_s: float = 60.0


class Gate:
    """`api_keys` empty: everybody may ask. `hosts` None: under any name."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        api_keys: Collection[str] = (),
        hosts: Collection[str] | None = None,
    ) -> None:
        self.app = app
        self._limits = limits
        self._keys = [key.encode() for key in api_keys]
        self._hosts = hosts
        self._memory = memory.MemoryReturn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            self._check_host(headers)
            self._check_key(scope, headers)
            _check_head(scope, headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:  # whoever asked is gone
            return
        if scope["method"] == "HEAD":  # what sends the answer leaves its body out
            scope = {**scope, "method": "GET"}
        is_long = len(body) > memory.LONG_BYTES
        if is_long:
            self._memory.schedule()
        replayed = _replayed(body, receive)
        del body  # a stream may last for an hour
        try:
            await self.app(scope, replayed, send)
        finally:
            if is_long:
                self._memory.schedule()

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A server without a key must not answer pages of other sites that resolve to it."""
        if self._hosts is None:
            return
        name = headers.get(b"host", b"").decode("latin-1").lower()
        bare = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
        if bare not in self._hosts:
            raise ApiError(403, f"not served under the name {bare[:100]!r}", code="unknown_host")

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self._keys or (scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # All of them, so that the time does not tell which one was near.
        matches = [hmac.compare_digest(key, given.strip()) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "a key is wanted: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        most = self._limits.body_bytes
        declared = headers.get(b"content-length", b"0")
        is_long = declared.isdigit() and int(declared[:20]) > most
        if is_long and b"expect" in headers:
            raise self._too_long()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    # What is too long is read all the same, and dropped: a client that still writes
                    # would not read the answer.
                    if is_long or size > most:
                        parts.clear()
                    else:
                        parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if is_long or size > most:
                raise self._too_long() from None
            raise ApiError(
                408,
                f"the body did not arrive within {self._limits.body_s:g} s",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        if is_long or size > most:
            raise self._too_long()
        return b"".join(parts)

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body is too long: at most {self._limits.body_bytes} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )


def _check_head(scope: Scope, headers: dict[bytes, bytes]) -> None:
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise ApiError(431, f"the head is too long: at most {MAX_HEAD_BYTES} bytes")
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # A form of another site could send any other kind without asking.
    if scope["method"] == "POST" and kind != b"application/json":
        raise ApiError(415, "the body is not marked as JSON: Content-Type: application/json")


def check_bind(host: str, *, has_key: bool) -> None:
    """Beyond this machine only with a key."""
    if not has_key and not is_loopback(host):
        raise RequestError(
            "a server without a key is for this machine only",
            where="--host",
            expected="127.0.0.1 or localhost",
            got=host,
            next_step="Set a key with --api-key, --api-key-file or EXL_API_KEY.",
        )


def is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise RequestError("--host is no address of this machine", got=host) from error
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return all(ipaddress.ip_address(one).is_loopback for one in addresses)


def hosts_of(host: str, api_keys: Collection[str]) -> frozenset[str] | None:
    """Names that a server which listens at `host` answers to; with a key all, because a page of
    another site does not know it."""
    return None if api_keys else frozenset({"localhost", "127.0.0.1", "::1", host.lower()})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body at once, and then whatever comes of the connection: that it is gone."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
