"""Metrics for Prometheus: requests, tokens, times, and the load of the engine."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exl_core.engine.events import FinishEvent, FinishReason

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Metrics of one server, in a registry of its own, so that several servers in one process do
    not mix."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # drops the creation time of each metric
        registry = self._registry = CollectorRegistry()
        self.answers = Counter(
            "exl_http_answers", "Answers by path and status", ("path", "status"), registry=registry
        )
        self.prompt_tokens = Counter("exl_prompt_tokens", "Tokens of prompts", registry=registry)
        self.cached_tokens = Counter(
            "exl_cached_prompt_tokens", "Prompt tokens found in the cache", registry=registry
        )
        self.reply_tokens = Counter("exl_reply_tokens", "Generated tokens", registry=registry)
        self.drafted = Counter("exl_drafted_tokens", "Draft tokens", registry=registry)
        self.accepted = Counter(
            "exl_accepted_tokens", "Draft tokens that were accepted", registry=registry
        )
        self.replies = Counter(
            "exl_replies", "Replies by finish reason", ("end",), registry=registry
        )
        self.queued = Histogram(
            "exl_queued_seconds",
            "Seconds from a request to its first forward pass",
            (),
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "exl_first_token_seconds",
            "Seconds from a request to its first token",
            (),
            buckets=_SECONDS,
            registry=registry,
        )
        self.running = Gauge("exl_running_replies", "Running replies", registry=registry)
        self.waiting = Gauge("exl_waiting_replies", "Waiting replies", registry=registry)
        self.pages_in_use = Gauge("exl_cache_pages_in_use", "Cache pages in use", registry=registry)
        self.pages = Gauge("exl_cache_pages", "Cache pages", registry=registry)

    def record_reply(self, end: FinishEvent) -> None:
        """Count a complete reply."""
        self.prompt_tokens.inc(end.prompt_tokens)
        self.cached_tokens.inc(end.cached_tokens)
        self.reply_tokens.inc(end.completion_tokens)
        if end.drafting is not None:
            self.drafted.inc(end.drafting.drafted)
            self.accepted.inc(end.drafting.accepted)
        self.replies.labels(end.reason.value).inc()
        self.queued.observe(end.queued_s)
        self.first_token.observe(end.queued_s + end.prefill_s)

    def dropped(self, prompt_tokens: int, reply_tokens: int) -> None:
        """Count a cancelled reply, whose client has left."""
        self.prompt_tokens.inc(prompt_tokens)
        self.reply_tokens.inc(reply_tokens)
        self.replies.labels(FinishReason.CANCELLED.value).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class CountAnswers:
    """ASGI middleware that counts every answer, by path and status. Unknown paths share one
    label."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.answers.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counting)
