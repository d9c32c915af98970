"""Checks before every request: host name, key, size of head and body, time for the body.

`Gate` is plain ASGI middleware, so that streams pass through it unchanged. It reads the whole body,
within its limits, before it forwards the request. The rest of the server never waits for a slow
sender.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exl_cli.server import memory
from exl_cli.server.errors import ApiError
from exl_cli.server.record import record_of
from exl_core.errors import RequestError

MAX_HEAD_BYTES = 64 * 1024

_HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^][:/@?#\s]+))(:[0-9]{0,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9, _-]{0,2000}")
_ORIGIN = re.compile(r"https?://[^/?#@\s*]+")
_SILENCE_S = 1.0  # a client that sends nothing for so long reads the answer

PIPE = "exl.pipe"
"""Key in `scope["state"]` of a `Pipe`, if the server offers a faster way than ASGI's `send`."""
OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no key. They reveal nothing secret; the page asks its user for the key."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests. Times are in seconds.

    body_bytes  maximum size of a request body
    header_s    maximum time until the head of a request has arrived
    body_s      maximum time until the body has arrived
    send_s      maximum time until a client has read the sent data
    reply_s     maximum time from the first pass of a reply to its end; the reply is cut off there
    max_queue   maximum number of waiting replies
    stall_s     time without a step after which /health reports that generation is stuck
    """

    body_bytes: int = 8 * 1024 * 1024
    header_s: float = 10.0
    body_s: float = 30.0
    send_s: float = 60.0
    reply_s: float = 1800.0
    max_queue: int = 256
    stall_s: float = 60.0


class Gate:
    """Middleware that checks each request. `api_keys` empty: no key is needed. `hosts` None: any
    host name is accepted. `origins`: sites whose pages may use the server; * is every site."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        api_keys: Collection[str] = (),
        hosts: Collection[str] | None = None,
        origins: Collection[str] = (),
    ) -> None:
        self.app = app
        self._origins = frozenset(origins)
        self._limits = limits
        self._keys = [key.encode() for key in api_keys]
        self._hosts = hosts
        self._memory = memory.MemoryReturn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and (origin in self._origins or "*" in self._origins):
            send = _allowing(origin, headers, send)
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await Response(status_code=204)(scope, receive, send)  # a browser's preflight
                return
        try:
            self._check_host(headers)
            self._check_key(scope, headers)
            _check_head(scope, headers)
            body = await self._body(scope, headers, receive)
        except ApiError as error:
            record_of(scope).reason = error.message
            await error.response(scope["path"])(scope, receive, send)
            return
        if body is None:  # the client has disconnected
            return
        if scope["method"] == "HEAD":  # uvicorn drops the body of the answer
            scope = {**scope, "method": "GET"}
        if scope["method"] == "POST" and not _is_json(headers):
            scope = _as_json(scope)
        is_long = len(body) > memory.LONG_BYTES
        if is_long:
            self._memory.schedule()
        replayed = _replayed(body, receive)
        del body  # frees it: a stream may last for an hour
        try:
            await self.app(scope, replayed, send)
        finally:
            if is_long:
                self._memory.schedule()

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuse unknown host names. Otherwise another site whose name resolves to this machine
        (DNS rebinding) could use a server without a key."""
        if self._hosts is None:
            return
        name = headers.get(b"host", b"").decode("latin-1").lower()
        parts = _HOST.fullmatch(name)
        bare = None if parts is None else parts["address"] or parts["name"]
        if bare not in self._hosts:
            raise ApiError(403, f"not served under the name {name[:100]!r}", code="unknown_host")

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self._keys or (scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")):
            return
        # Compares with all keys, so that the time reveals nothing about them.
        given = key_of(headers)
        matches = [hmac.compare_digest(key, given) for key in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "a key is required: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive
    ) -> bytes | None:
        most = self._limits.body_bytes
        declared = headers.get(b"content-length", b"0")
        is_long = declared.isdigit() and int(declared[:20]) > most
        if is_long and b"expect" in headers:
            raise self._too_long()
        pipe = scope.get("state", {}).get(PIPE)
        parts: list[bytes] = []
        size = 0
        deadline = time.monotonic() + self._limits.body_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                async with asyncio.timeout(max(min(_SILENCE_S, left_s), 0)):
                    message = await receive()
            except TimeoutError:
                announced = size + (0 if pipe is None else pipe.chunk_bytes_left)
                if is_long or announced > most:
                    raise self._too_long() from None
                if left_s <= _SILENCE_S:
                    raise self._too_slow() from None
                continue
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            # A body that is too long is still read, and dropped. A client that is still writing
            # would not read the answer.
            if is_long or size > most:
                parts.clear()
            else:
                parts.append(part)
            if not message.get("more_body", False):
                break
        if is_long or size > most:
            raise self._too_long()
        return b"".join(parts)

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the body did not arrive within {self._limits.body_s:g} s",
            code="request_timeout",
            headers={"Connection": "close"},
        )

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body is too long: at most {self._limits.body_bytes} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )


def key_of(headers: dict[bytes, bytes]) -> bytes:
    """The key of a request: as a bearer token, or in the header of Anthropic's and tabbyAPI's
    clients. Empty without one."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return given.strip()
    return headers.get(b"x-api-key", headers.get(b"x-admin-key", b"")).strip()


def _allowing(origin: str, headers: dict[bytes, bytes], send: Send) -> Send:
    """ASGI send function that lets a page of this origin read the response (CORS)."""
    wanted = headers.get(b"access-control-request-headers", b"")
    allowed = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", wanted if _HEADER_NAMES.fullmatch(wanted) else b""),
        (b"access-control-expose-headers", b"retry-after, x-exl-ignored"),
        (b"access-control-max-age", b"600"),
        (b"vary", b"Origin"),
    ]

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *allowed]}
        await send(message)

    return answer


def _check_head(scope: Scope, headers: dict[bytes, bytes]) -> None:
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise ApiError(431, f"the head is too long: at most {MAX_HEAD_BYTES} bytes")
    # Browsers let forms of other sites send other content types without a preflight request. They
    # send Origin with every POST. curl does not, and its default is the type of a form.
    is_browser = b"origin" in headers or b"sec-fetch-site" in headers
    if scope["method"] == "POST" and is_browser and not _is_json(headers):
        raise ApiError(415, "the body needs the header Content-Type: application/json")
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        raise ApiError(
            415,
            f"a body with Content-Encoding {encoding[:60].decode('latin-1')!r} is not supported",
        )


def _is_json(headers: dict[bytes, bytes]) -> bool:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return kind == b"application/json"


def _as_json(scope: Scope) -> Scope:
    """The request with the content type of JSON: the only bodies that this server reads."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def check_bind(host: str, *, has_key: bool) -> None:
    """Refuse an address that other machines can reach, unless the server has a key."""
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
        raise RequestError("--host is not an address of this machine", got=host) from error
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return all(ipaddress.ip_address(one).is_loopback for one in addresses)


def hosts_of(
    host: str, api_keys: Collection[str], allowed: Collection[str] = ()
) -> frozenset[str] | None:
    """Host names that a server at `host` answers to. None, any name, if it has keys: pages of other
    sites do not know them."""
    if api_keys:
        return None
    known = {"localhost", "127.0.0.1", "::1", host.lower()}
    return frozenset(known | {name.lower() for name in allowed})


def check_origins(origins: Collection[str], *, has_key: bool) -> None:
    """Refuse what is no origin, and every origin for a server without a key."""
    for origin in origins:
        if origin == "*" and has_key:
            continue
        if not _ORIGIN.fullmatch(origin):
            raise RequestError(
                "a server without a key is not for the pages of all sites"
                if origin == "*"
                else "not the origin of a site",
                where="--cors",
                expected="scheme and host, such as http://localhost:3000",
                got=origin,
                next_step="Set a key with --api-key, --api-key-file or EXL_API_KEY."
                if origin == "*"
                else None,
            )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """ASGI receive function that returns the body first, then later messages, such as the
    disconnect."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
