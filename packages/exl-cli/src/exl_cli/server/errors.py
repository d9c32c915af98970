"""Error responses in OpenAI's format, and the conversion of exceptions into them.

The body is `{"error": {"message", "type", "param", "code"}}`, on every path and for every status,
including errors of the framework and of the HTTP parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from exl_cli.server.record import record_of
from exl_core.constrain.trial import TrialStoppedError
from exl_core.errors import (
    ContextLengthError,
    ExlError,
    OutOfMemoryError,
    RankError,
    RequestError,
    TemplateError,
    printable,
)

INVALID = "invalid_request_error"


class ApiError(Exception):
    """A refused or failed request: HTTP status, and the fields of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        return {
            "error": {
                "message": printable(self.message),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "") -> Response:
        """The response, in the form that clients of this path expect."""
        return json_reply(shaped(self, path), self.status, self.headers)


def shaped(error: ApiError, path: str) -> dict[str, object]:
    """The body of an error: in OpenAI's form, in that of Anthropic, or in that of ollama."""
    message = printable(error.message)
    if path.endswith("/messages") or "/messages/" in path:
        kind = _ANTHROPIC_KINDS.get(error.status, error.kind)
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": message} if path.startswith("/api/") else error.body


_ANTHROPIC_KINDS = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(value: object) -> bytes:
    """JSON in UTF-8. A lone surrogate, which a client may have sent, is written as an escape."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def json_reply(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def api_error_of(error: ExlError) -> ApiError:
    """The response for an error of the engine."""
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError | TemplateError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, str(error), kind="server_error", code="out_of_memory")
    if isinstance(error, TrialStoppedError):
        return ApiError(503, "the server is shutting down", kind="server_error")
    if isinstance(error, RankError):
        return ApiError(503, str(error), kind="server_error", code="rank_failed")
    return ApiError(500, str(error), kind="server_error")


def install_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return _answer(request, error)

    @app.exception_handler(ExlError)
    async def _exl(request: Request, error: ExlError) -> Response:
        return _answer(request, api_error_of(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return _answer(request, refusal(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        return _answer(request, _http_error(request, error))

    @app.exception_handler(RecursionError)
    async def _deep(request: Request, _error: RecursionError) -> Response:
        error = ApiError(400, "the body is nested too deeply", code="invalid_json")
        return _answer(request, error)

    @app.exception_handler(Exception)
    async def _bug(request: Request, _error: Exception) -> Response:
        # uvicorn closes the connection after an exception; the header announces it to the client.
        headers = {"Connection": "close"}
        error = ApiError(500, "internal error", kind="server_error", headers=headers)
        return _answer(request, error)


def _answer(request: Request, error: ApiError) -> Response:
    record_of(request.scope).reason = error.message
    return error.response(request.url.path)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    message = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"no such path: {request.method} {request.url.path[:200]}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path[:200]} does not take {request.method}"
    elif error.status_code == HTTPStatus.BAD_REQUEST:  # FastAPI's, for a body that json cannot read
        is_deep = isinstance(error.__cause__, RecursionError)
        reason = "it is nested too deeply" if is_deep else error.__cause__
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    return ApiError(error.status_code, message, headers=error.headers)


def refusal(problems: Sequence[Any]) -> ApiError:
    """The error of the first invalid field.

    A field of a union type has one problem for each member of the union. The common prefix of
    their locations is reported as the parameter.
    """
    first = problems[0]
    kind, path = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    if not path and kind == "value_error":  # a rule of the whole body
        return ApiError(400, str(first["ctx"]["error"]), code="missing_required_parameter")
    if not path:
        return ApiError(400, "the body is not a JSON object", code="invalid_json")
    same = [one for one in problems if one["loc"][1:2] == path[:1]]
    shared = path
    for one in same[1:]:
        shared = tuple(a for a, b in zip(shared, one["loc"][1:], strict=False) if a == b)
    param = ".".join(map(str, shared))[:200]
    kinds = [one for one in same if one["type"] == "literal_error" and one["loc"][-1] == "type"]
    if len(kinds) == 1:  # an unknown `type` is the cause of all other problems of the field
        text = f"{param}: {str(kinds[0]['input'])[:100]!r} is not supported: {kinds[0]['msg']}"
        return ApiError(400, text, param=param, code="invalid_value")
    messages = dict.fromkeys(str(one["msg"]) for one in same)
    code = "missing_required_parameter" if kind == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {'; or: '.join(list(messages)[:4])}", param=param, code=code)
