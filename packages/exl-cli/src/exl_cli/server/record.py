"""One line of log for each request, and the header that names ignored fields.

`RequestLog` is ASGI middleware. It puts a `Record` into the request's scope; the rest of the server
fills it in. Prompts and replies are never part of a line.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exl_cli.server.log_limit import limit_log_lines
from exl_core.engine.events import FinishEvent
from exl_core.errors import printable

LOG = logging.getLogger("exl.server")
REFUSALS = logging.getLogger("exl.server.refusals")
IGNORED_HEADER = b"x-exl-ignored"
_KEY = "exl.record"
_QUIET_PATHS = frozenset({"/health", "/metrics"})
_MAX_NAMES = 32
_MAX_NAME_CHARS = 60
_MAX_CLIENTS = 4096


@dataclass
class Record:
    """Facts about one request that its log line shows.

    ignored  names of fields that the server does not know
    ends     ends of its replies
    reason   reason of a refusal or failure
    """

    ignored: tuple[str, ...] = ()
    ends: Sequence[FinishEvent] = ()
    reason: str = ""
    status: int = 0
    started: float = field(default_factory=time.monotonic)


def record_of(scope: Scope) -> Record:
    state: dict[str, Any] = scope.setdefault("state", {})
    record: Record = state.setdefault(_KEY, Record())
    return record


def shown_names(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in printable ASCII, shortened, and not too many: a client chose them."""
    found: dict[str, None] = {}
    for name in names:
        if len(found) == _MAX_NAMES:
            found["..."] = None
            break
        shown = printable(name[:_MAX_NAME_CHARS]).encode("ascii", "replace").decode()
        found[shown.replace(",", "?")] = None
    return tuple(found)


class RequestLog:
    """Middleware that logs every request and adds the header to its response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._noted: set[tuple[str, str]] = set()  # clients and fields that were logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = record_of(scope)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if record.ignored:
                    value = ", ".join(record.ignored).encode()
                    headers = [*message.get("headers", ()), (IGNORED_HEADER, value)]
                    message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            self._note_ignored(scope, record)
            _log(scope, record)

    def _note_ignored(self, scope: Scope, record: Record) -> None:
        """One line for each client and field."""
        client = _client_of(scope)
        for name in record.ignored:
            if (client, name) not in self._noted and len(self._noted) < _MAX_CLIENTS:
                self._noted.add((client, name))
                text = "field %s is unknown and ignored (client %s)"
                LOG.warning(text, name, client, extra={"facts": {"ignored": name}})


class JsonLines(logging.Formatter):
    """Log records as JSON objects, one per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": round(record.created, 3), "level": record.levelname.lower()}
        fields |= {"message": record.getMessage(), **getattr(record, "facts", {})}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def set_up_log(level: str, *, as_json: bool) -> None:
    """Write the log to stderr. `level`: debug, info, warning or error."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if as_json else plain)
    for name, lowest in (("exl", level), ("uvicorn", "warning")):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(lowest.upper())
        logger.propagate = False
    limit_log_lines(REFUSALS)


def _client_of(scope: Scope) -> str:
    agent = dict(scope["headers"]).get(b"user-agent", b"").decode("latin-1")
    return printable(agent[:80]) or "without a name"


def _log(scope: Scope, record: Record) -> None:
    level = logging.INFO
    if record.status >= 500:
        level = logging.ERROR
    elif scope["path"] in _QUIET_PATHS:
        level = logging.DEBUG
    logger = REFUSALS if record.status >= 400 else LOG
    if not logger.isEnabledFor(level):
        return
    facts = _facts(scope, record)
    text = " ".join(
        f"{value}" if name in ("method", "path", "status", "reason") else f"{name}={value}"
        for name, value in facts.items()
    )
    logger.log(level, text, extra={"facts": facts})


def _facts(scope: Scope, record: Record) -> dict[str, object]:
    facts: dict[str, object] = {
        "method": scope["method"],
        "path": printable(scope["path"][:200]),
        "status": record.status or "gone",  # the client left before an answer began
        "seconds": round(time.monotonic() - record.started, 3),
    }
    if record.ends:
        reply = sum(end.completion_tokens for end in record.ends)
        later = sum(max(end.completion_tokens - 1, 0) for end in record.ends)
        decode_s = max(end.decode_s for end in record.ends)
        facts |= {
            "prompt_tokens": sum(end.prompt_tokens for end in record.ends),
            "cached_tokens": sum(end.cached_tokens for end in record.ends),
            "reply_tokens": reply,
            "first_token_s": round(max(e.queued_s + e.prefill_s for e in record.ends), 3),
            "tokens_per_second": round(later / decode_s, 1) if decode_s > 0 else 0.0,
        }
    if record.reason:
        facts["reason"] = printable(record.reason[:300])
    return facts
