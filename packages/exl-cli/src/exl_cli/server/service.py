"""Parts that all answers share: models, queue limit, requests and their settings, usage counts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import TypeVar

from exl_cli.server.engine_request import Wanted, dry_breakers, make_requests
from exl_cli.server.errors import ApiError, api_error_of
from exl_cli.server.limits import Limits
from exl_cli.server.metrics import Metrics
from exl_cli.server.models import ModelHost, Resident
from exl_cli.server.record import LOG, Record, shown_names
from exl_cli.server.schema import Body, GenerationBody
from exl_cli.server.settings import Settings
from exl_core.engine.events import FinishEvent, FinishReason
from exl_core.errors import ExlError, printable
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result

T = TypeVar("T")
LONG_CHARS = 64 * 1024


class Service:
    """allow_special  texts of messages may spell special tokens, unless a request says no
    is_strict      an unknown field is an error
    logs_prompts   prompts are logged
    """

    def __init__(
        self,
        host: ModelHost,
        limits: Limits,
        *,
        allow_special: bool = False,
        is_strict: bool = False,
        logs_prompts: bool = False,
    ) -> None:
        self.host = host
        self.allow_special = allow_special
        self.is_strict = is_strict
        self.logs_prompts = logs_prompts
        self.limits = limits
        self.metrics = Metrics()
        self._admitted = 0  # replies that run, or wait for the engine or for their model
        self._mean_s = 1.0  # moving average of a request's duration
        self._long_work = ThreadPoolExecutor(1, thread_name_prefix="exl-long-text")

    def accept(self, body: Body, record: Record) -> None:
        """Note the fields of the body that the server does not know. In strict mode the first of
        them is an error."""
        unknown = shown_names(body.unknown_fields())
        if self.is_strict and unknown:
            param = unknown[0]
            raise ApiError(
                400, f"unsupported parameter: {param}", param=param, code="unsupported_parameter"
            )
        record.ignored = unknown

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Reserve room for `count` replies during the block. Raises an error with Retry-After if
        the queue is full."""
        resident = self.host.resident
        batch = 1 if resident is None else resident.max_batch
        most = batch + self.limits.max_queue
        if count > most:
            raise ApiError(400, f"{count} replies in one request; at most {most} are possible")
        if self._admitted + count > most:
            wait_s = math.ceil(self._mean_s * self._admitted / batch)
            raise ApiError(
                429,
                f"{self._admitted} replies run or wait already; try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(min(max(wait_s, 1), 60))},
            )
        self._admitted += count
        started = time.monotonic()
        try:
            yield
        finally:
            self._admitted -= count
            self._mean_s += 0.2 * (time.monotonic() - started - self._mean_s)

    async def enter(self, stack: AsyncExitStack, model: str | None, count: int) -> Resident:
        """Reserve room in the queue and the model until the stack is closed."""
        stack.enter_context(self.admit(count))
        return await stack.enter_async_context(self.host.use(model))

    async def in_thread(self, work: Callable[[], T], size: int) -> T:
        """Run work on a text of `size` characters on a thread, so that the event loop goes on.

        Work on long texts runs one piece at a time, on a thread of its own: work on short texts
        never waits for it, and its memory does not add up.
        """
        if size <= LONG_CHARS:
            return await in_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._long_work, work)

    def close(self) -> None:
        self._long_work.shutdown(wait=False, cancel_futures=True)

    async def submit(
        self,
        stack: AsyncExitStack,
        resident: Resident,
        settings: Settings,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
    ) -> list[AsyncJob]:
        """Submit `n` requests for each prompt. Closing the stack cancels those that still run."""
        tokenizer = resident.runtime.loaded.tokenizer
        if settings.sampler.get("dry_multiplier") or resident.defaults.get("dry_multiplier"):
            await in_thread(lambda: dry_breakers(tokenizer, settings))
        jobs = []
        for request in make_requests(resident, settings, prompts, wanted):
            if self.logs_prompts:
                LOG.info("prompt: %s", printable(tokenizer.decode(request.prompt_ids)))
            job = await resident.jobs.submit(request)
            stack.callback(self._drop, job)
            jobs.append(job)
        return jobs

    def _drop(self, job: AsyncJob) -> None:
        if not job.job.is_finished:
            self.metrics.dropped(len(job.job.request.prompt_ids), job.job.num_tokens)
        job.cancel()

    def ends_of(self, ends: Sequence[FinishEvent | None]) -> list[FinishEvent]:
        """Count the finished replies. Raises ApiError unless all have ended."""
        found = [end for end in ends if end is not None]
        for end in found:
            self.metrics.record_reply(end)
        if len(found) < len(ends):
            raise ApiError(503, "the server is shutting down", kind="server_error")
        return found

    def observe(self) -> None:
        """Update the gauges."""
        resident = self.host.resident
        running = pages = held = 0
        if resident is not None:
            engine = resident.runtime.engine
            running, pages = len(engine.scheduler.running), engine.pool.num_pages
            held = pages - engine.pool.num_available
        self.metrics.running.set(running)
        self.metrics.waiting.set(max(self._admitted - running, 0))
        self.metrics.pages.set(pages)
        self.metrics.pages_in_use.set(held)


def wants_usage_chunk(fields: GenerationBody) -> bool:
    return fields.stream_options is not None and fields.stream_options.include_usage


def extra_fields(
    fields: GenerationBody, jobs: Sequence[AsyncJob]
) -> Callable[[], dict[str, object]]:
    """Function that returns further fields for each event of a stream: the usage so far, if the
    client requested it."""
    if fields.stream_options is None or not fields.stream_options.continuous_usage_stats:
        return dict
    prompt = sum(len(job.job.request.prompt_ids) for job in jobs[:: fields.settings.n])

    def usage() -> dict[str, object]:
        reply = sum(job.job.num_tokens for job in jobs)
        counts = {"completion_tokens": reply, "total_tokens": prompt + reply}
        return {"usage": {"prompt_tokens": prompt, **counts}}

    return usage


async def results_of(jobs: Sequence[AsyncJob]) -> AsyncIterator[tuple[int, Result]]:
    """All results of each job with its number, after the job has ended."""
    for number, job in enumerate(jobs):
        await job.ended()
        while (result := job.take()) is not None:
            yield number, result


async def in_thread(work: Callable[[], T]) -> T:
    """Run work on a thread, such as tokenizing and rendering, so that the event loop goes on."""
    return await asyncio.to_thread(work)


def figures_of(ends: Sequence[FinishEvent], n: int) -> dict[str, object]:
    """Usage and timings of an answer whose replies have all ended, `n` for each prompt."""
    return {"usage": usage_of(ends, n), "timings": timings_of(ends)}


def usage_of(ends: Sequence[FinishEvent], n: int) -> dict[str, object]:
    """Token counts. `ends`: of all replies in order, `n` for each prompt. A prompt counts once."""
    firsts = ends[::n]
    prompt = sum(end.prompt_tokens for end in firsts)
    reply = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
    }


def timings_of(ends: Sequence[FinishEvent]) -> dict[str, object]:
    """Timings under llama.cpp's names. Several replies run in parallel: tokens are summed, of the
    times the longest counts."""
    computed = sum(end.prompt_tokens - end.cached_tokens for end in ends)
    decoded = sum(end.completion_tokens for end in ends)
    prompt_s = max(end.prefill_s for end in ends)
    # The last prefill pass yields the first token of a reply, so decode time covers one less.
    later = sum(max(end.completion_tokens - 1, 0) for end in ends)
    reply_s = max(end.decode_s for end in ends)
    timings: dict[str, object] = {
        "cache_n": sum(end.cached_tokens for end in ends),
        "prompt_n": computed,
        "prompt_ms": round(1000 * prompt_s, 3),
        "prompt_per_second": round(computed / prompt_s, 2) if prompt_s > 0 else 0.0,
        "predicted_n": decoded,
        "predicted_ms": round(1000 * reply_s, 3),
        "predicted_per_second": round(later / reply_s, 2) if reply_s > 0 else 0.0,
        "queued_ms": round(1000 * max(end.queued_s for end in ends), 3),
    }
    if any(end.reason is FinishReason.TIME for end in ends):
        timings["is_out_of_time"] = True
    drafting = [end.drafting for end in ends if end.drafting is not None]
    if drafting:
        timings["draft_n"] = sum(one.drafted for one in drafting)
        timings["draft_n_accepted"] = sum(one.accepted for one in drafting)
    return timings


def failure_of(error: Exception) -> ApiError:
    """The error to send at the end of a stream that fails."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ExlError):
        return api_error_of(error)
    return ApiError(500, "internal error", kind="server_error")
