"""Figures for Prometheus: what came in, what came of it, how full the engine is."""

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
    """One server's; several in one process do not mix."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # nobody asks when one began
        registry = self._registry = CollectorRegistry()
        self.answers = Counter(
            "exl_http_answers", "Answers by path and status", ("path", "status"), registry=registry
        )
        self.prompt_tokens = Counter("exl_prompt_tokens", "Tokens of prompts", registry=registry)
        self.cached_tokens = Counter(
            "exl_cached_prompt_tokens", "Of those, found in the cache", registry=registry
        )
        self.reply_tokens = Counter("exl_reply_tokens", "Generated tokens", registry=registry)
        self.drafted = Counter("exl_drafted_tokens", "Tokens guessed ahead", registry=registry)
        self.accepted = Counter("exl_accepted_tokens", "Of those, right", registry=registry)
        self.replies = Counter("exl_replies", "Replies by their end", ("end",), registry=registry)
        self.queued = Histogram(
            "exl_queued_seconds",
            "From a request to its first pass",
            (),
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "exl_first_token_seconds",
            "From a request to its first token",
            (),
            buckets=_SECONDS,
            registry=registry,
        )
        self.running = Gauge("exl_running_replies", "Replies that run", registry=registry)
        self.waiting = Gauge("exl_waiting_replies", "Replies that wait", registry=registry)
        self.pages_in_use = Gauge("exl_cache_pages_in_use", "Held pages", registry=registry)
        self.pages = Gauge("exl_cache_pages", "Pages of the cache", registry=registry)

    def took(self, end: FinishEvent) -> None:
        """A reply has ended."""
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
        """A reply was cancelled: nobody waits for the rest."""
        self.prompt_tokens.inc(prompt_tokens)
        self.reply_tokens.inc(reply_tokens)
        self.replies.labels(FinishReason.CANCELLED.value).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class CountAnswers:
    """ASGI: counts every answer, whoever gives it. Paths that do not exist are one."""

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
