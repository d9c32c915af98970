"""Long bodies: limits on the memory and time that they take, and parsing off the event loop.

Parsing JSON and validating it hold the GIL while they run. Their time grows with the number of
values, not with the number of characters: 8 MB of text take 20 ms, 8 MB of `[1],[1],...` take two
seconds. Therefore the values of a long body are counted before it is parsed. The count runs in
steps that hold the GIL for about a millisecond each. This module knows bytes and JSON, but neither
fields nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from exl_cli.server.errors import ApiError
from exl_cli.server.service import Service

LONG_BYTES = 64 * 1024
"""Bodies up to this size take at most a few milliseconds, whatever their content."""
MAX_VALUES = 256 * 1024
"""Maximum number of values in all lists and objects together. A context longer than this raises it.
A token id takes 0.1 us."""
MAX_CONTAINERS = 8 * 1024
"""Maximum number of lists and objects. A message takes 5 us."""
MAX_KEYS = 16 * 1024
"""Maximum number of fields in all objects together. An unknown field takes 5 us."""
MAX_FIELDS = 256
"""Maximum number of fields of the body itself."""

_STEP_BYTES = 64 * 1024
_CODE = "request_too_large"


def long_body_route(service: Service) -> type[APIRoute]:
    """Route class that parses long bodies by `parse`, on the thread for long work."""

    class LongBodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def read(request: Request) -> Response:
                body = await request.body()
                if len(body) <= LONG_BYTES:
                    return await handle(request)
                resident = service.host.resident
                ctx_size = 0 if resident is None else resident.runtime.ctx_size
                value = await service.in_thread(lambda: parse(body, ctx_size), len(body))
                return await handle(_Parsed(request, value))

            return read

    return LongBodyRoute


class _Parsed(Request):
    """A request with a parsed body. It does not keep the bytes."""

    def __init__(self, request: Request, value: object) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # FastAPI calls `json` only for a body that is not empty

    async def json(self) -> object:
        return self._value


def parse(body: bytes, ctx_size: int) -> object:
    """The JSON value of the body. Raises ApiError if it is too large or invalid."""
    check_structure(body, ctx_size)
    try:
        value: object = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ApiError(413, f"the body has more than {MAX_FIELDS} fields", code=_CODE)
    return value


def check_structure(data: bytes, ctx_size: int) -> None:
    """Count commas, brackets and colons outside of strings, and refuse too many of them.

    Invalid JSON may pass; parsing refuses it.
    """
    max_values = max(MAX_VALUES, ctx_size)
    values = containers = keys = 0
    is_text = False
    position = 0
    while position < len(data):
        end = position + _STEP_BYTES
        while data[end - 1 : end] == b"\\":  # do not split an escape sequence
            end += 1
        step = data[position:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        position = end
        parts = step.split(b'"')
        outside = b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        values += outside.count(b",")
        containers += outside.count(b"{") + outside.count(b"[")
        keys += outside.count(b":")
        if containers > MAX_CONTAINERS:
            message = f"the body has more than {MAX_CONTAINERS} lists and objects"
            raise ApiError(413, message, code=_CODE)
        if keys > MAX_KEYS:
            raise ApiError(
                413, f"the objects of the body have more than {MAX_KEYS} fields", code=_CODE
            )
        if values > max_values and containers <= 2:  # the body and one list
            raise ApiError(
                400,
                f"a list of more than {max_values} values does not fit into the context",
                code="context_length_exceeded",
            )
        if values > max_values:
            raise ApiError(413, f"the body has more than {max_values} values", code=_CODE)
