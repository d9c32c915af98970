"""Answers a batch's prompts with one open model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from exl_cli.batch.job import PromptJob, PromptWriter
from exl_cli.batch.prompt_file import BatchLine
from exl_cli.load import explaining_long_prompts
from exl_core.engine.events import FailEvent, FinishEvent
from exl_core.errors import ExlError

Record = dict[str, object]
_QUEUED = 2
"""Requests that wait in the engine for each one that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Requests that run at the same time, and tokens of the cache that they share."""

    max_batch: int
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class BatchJob:
    """`ReplicaJob` of a file of prompts: its items are lines."""

    job: PromptJob
    limits: BatchLimits

    @property
    def device(self) -> str:
        return self.job.running.device

    @property
    def threads(self) -> int | None:
        return self.job.running.threads

    def placed(self, device: str, threads: int | None) -> BatchJob:
        running = replace(self.job.running, device=device, threads=threads)
        return replace(self, job=replace(self.job, running=running))

    def worker(self, *, is_quiet: bool) -> BatchWorker:
        return BatchWorker(self.job, self.limits, is_quiet=is_quiet)


class BatchWorker:
    """A model that answers lines of a batch, many at the same time."""

    def __init__(self, job: PromptJob, limits: BatchLimits, *, is_quiet: bool) -> None:
        self._writer: PromptWriter = job.open(
            is_quiet=is_quiet, max_batch=limits.max_batch, cache_tokens=limits.cache_tokens
        )
        self._most = limits.max_batch * (1 + _QUEUED)

    def answer(
        self, lines: Iterable[BatchLine], is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[int, Record]]:
        """Index and record of each line, in the order in which replies end.

        A line that cannot be answered gets a record with `error`. Once `is_stopped` returns true,
        running requests are cancelled and have no record.
        """
        engine, waiting = self._writer.runtime.engine, iter(lines)
        running: dict[str, BatchLine] = {}
        try:
            while not is_stopped():
                for line in waiting:
                    try:
                        running[self._submit(line)] = line
                    except ExlError as error:
                        yield line.index, _failed(line, error)
                    if len(running) >= self._most:
                        break
                if not running:
                    return
                for event in engine.step():
                    if isinstance(event, FinishEvent):
                        line = running.pop(event.request_id)
                        yield line.index, _answered(line, event)
                    elif isinstance(event, FailEvent):
                        line = running.pop(event.request_id)
                        yield line.index, _failed(line, event.error)
        finally:
            for request_id in running:
                engine.cancel(request_id)
                engine.discard_events(request_id)

    def _submit(self, line: BatchLine) -> str:
        writer = self._writer
        with explaining_long_prompts(writer.runtime):
            request = writer.request(line.prompt, number=line.index, limit=line.limit)
        engine = writer.runtime.engine
        engine.submit(request, engine.compile(request))
        return request.request_id


def _answered(line: BatchLine, reply: FinishEvent) -> Record:
    return {
        **_named(line),
        "text": reply.text,
        "finish_reason": reply.reason.value,
        "stopped_by": reply.stopped_by,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
    }


def _failed(line: BatchLine, error: BaseException) -> Record:
    return {**_named(line), "error": str(error)}


def _named(line: BatchLine) -> Record:
    return line.place if line.id is None else {**line.place, "id": line.id}
