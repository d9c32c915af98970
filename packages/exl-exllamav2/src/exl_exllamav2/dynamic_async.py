"""ExLlamaV2DynamicGeneratorAsync: jobs of the dynamic generator in an event loop.

Steps run on one thread, "the engine's thread". The event loop makes and cancels jobs: it records
them as actions, which the thread runs before its next step. The checks of a new job run there too,
except the check that a job is enqueued once. Their error is raised where the job is iterated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from exl_exllamav2.dynamic import ExLlamaV2DynamicGenerator
from exl_exllamav2.errors import OldRuntimeError
from exl_exllamav2.job import ExLlamaV2DynamicJob, Result


class ExLlamaV2DynamicGeneratorAsync:
    """Makes a dynamic generator, `generator`, and a task that runs its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = ExLlamaV2DynamicGenerator(*args, **kwargs)
        self.jobs: dict[ExLlamaV2DynamicJob, ExLlamaV2DynamicJobAsync] = {}
        self.condition = asyncio.Condition()
        self._actions: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exl-engine")
        self._is_closed = False
        self.iteration_task = asyncio.get_running_loop().create_task(self._run())

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Queue a job, once. All other errors of the job are raised by its own iteration."""
        if self._is_closed:
            raise OldRuntimeError("the generator is closed")
        job.job.check_is_new(is_queued=job.job in self.jobs)
        self.jobs[job.job] = job

        def start() -> None:
            try:
                self.generator.enqueue(job.job)
            except Exception as error:  # noqa: BLE001 - raised where the job is iterated
                job.failed_to_start = error

        self._actions.append(start)
        self._wake.set()

    async def cancel(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """End a job without further results. No effect on one that has ended."""
        if self.jobs.pop(job.job, None) is None:
            return
        self._actions.append(lambda: self.generator.cancel(job.job))
        self._wake.set()
        job.cancelled = True
        job.queue.put_nowait(None)

    async def close(self) -> None:
        """End all jobs and the task."""
        self._is_closed = True
        for job in list(self.jobs.values()):
            await self.cancel(job)
        self._wake.set()
        await self.iteration_task
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not (self._is_closed and not self._actions):
            await self._wake.wait()
            self._wake.clear()
            while self.jobs or self._actions:
                try:
                    results = await loop.run_in_executor(self._thread, self._step)
                except Exception as error:  # noqa: BLE001 - delivered to every waiting job
                    self._fail(error)
                else:
                    self._deliver(results)

    def _step(self) -> list[Result]:
        """Runs on the engine's thread."""
        while self._actions:
            self._actions.popleft()()
        return self.generator.iterate()

    def _deliver(self, results: list[Result]) -> None:
        for job in list(self.jobs.values()):
            if job.failed_to_start is not None:
                del self.jobs[job.job]
                job.queue.put_nowait(job.failed_to_start)
        for result in results:
            waiting = self.jobs.get(result["job"])
            if waiting is None:
                continue  # cancelled during the step
            if result["eos"]:
                del self.jobs[result["job"]]
            waiting.queue.put_nowait(result)

    def _fail(self, error: Exception) -> None:
        self.generator.clear_queue()
        for job in self.jobs.values():
            job.queue.put_nowait(error)
        self.jobs.clear()


class ExLlamaV2DynamicJobAsync:
    """A job of an asynchronous generator: `async for result in job`."""

    def __init__(
        self, generator: ExLlamaV2DynamicGeneratorAsync, *args: Any, **kwargs: Any
    ) -> None:
        self.generator = generator
        self.job = ExLlamaV2DynamicJob(*args, **kwargs)
        self.queue: asyncio.Queue[Result | Exception | None] = asyncio.Queue()
        self.cancelled = False
        self.failed_to_start: Exception | None = None
        self._has_ended = False
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[Result]:
        while not self._has_ended:
            found = await self.queue.get()
            if isinstance(found, Exception):
                self._has_ended = True
                raise found
            if found is None:
                return
            self._has_ended = found["eos"]
            yield found

    async def cancel(self) -> None:
        await self.generator.cancel(self)
