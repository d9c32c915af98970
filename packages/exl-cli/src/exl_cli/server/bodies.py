"""Long bodies: bounded in what they make of memory and time, and parsed off the event loop.

Parsing JSON and checking it against the schema hold the interpreter for as long as they run. The
time grows with the number of values, not of characters: eight megabytes of text take 20 ms, as many
of `[1],[1],...` two seconds. So the values of a long body are counted first, in steps that
hold the interpreter for about a millisecond each. Knows bytes and JSON; neither fields nor models.
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
"""Shorter bodies take a few milliseconds, whatever they hold."""
MAX_VALUES = 256 * 1024
"""Of all lists and objects together; a longer context raises it. Token ids take 0.1 us each."""
MAX_CONTAINERS = 8 * 1024
"""Lists and objects. A message takes 5 us."""
MAX_KEYS = 16 * 1024
"""Fields of all objects. One that is not known takes 5 us."""
MAX_FIELDS = 64
"""Fields of the body itself; all that are not known are told of."""

_STEP_BYTES = 64 * 1024
_CODE = "request_too_large"


def long_body_route(service: Service) -> type[APIRoute]:
    """Routes whose long bodies are parsed by `parse`, on the thread for long work."""

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
    """A request whose body is a value already. The bytes are forgotten."""

    def __init__(self, request: Request, value: object) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # not empty: there is one

    async def json(self) -> object:
        return self._value


def parse(body: bytes, ctx_size: int) -> object:
    """The JSON value, if it is not too large."""
    check_structure(body, ctx_size)
    try:
        value: object = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ApiError(413, f"the body has more than {MAX_FIELDS} fields", code=_CODE)
    return value


def check_structure(data: bytes, ctx_size: int) -> None:
    """Counts what is outside of texts. JSON that is not valid may be refused or not."""
    max_values = max(MAX_VALUES, ctx_size)
    values = containers = keys = 0
    is_text = False
    position = 0
    while position < len(data):
        end = position + _STEP_BYTES
        while data[end - 1 : end] == b"\\":  # not between a backslash and what it escapes
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
            message = f"the body holds more than {MAX_CONTAINERS} lists and objects"
            raise ApiError(413, message, code=_CODE)
        if keys > MAX_KEYS:
            raise ApiError(
                413, f"the objects of the body have more than {MAX_KEYS} fields", code=_CODE
            )
        if values > max_values and containers <= 2:  # the body, and one list in it
            raise ApiError(
                400,
                f"a list of more than {max_values} values does not fit into the context",
                code="context_length_exceeded",
            )
        if values > max_values:
            raise ApiError(413, f"the body holds more than {max_values} values", code=_CODE)
