"""The dynamic generator for asyncio: jobs are awaited, steps run on a thread of their own.

All calls come from one event loop; what they ask of the engine is done between two steps. A
consumer that goes away, cancelled or by leaving its loop, takes its job with it and nothing else; a
slow one holds nobody up. A step that fails ends the jobs that ran with its error; later ones run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.dynamic import DynamicGenerator, Job, Result


class AsyncJob:
    """Results of one request: `async for result in job`, once.

    The last result has `finish`. Raises what made the job fail. Ends early where `cancel` was
    called.
    """

    def __init__(self, generator: AsyncGenerator, job: Job) -> None:
        self.job = job
        self._generator = generator
        self._results: asyncio.Queue[Result | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Result]:
        try:
            while (result := await self._results.get()) is not None:
                if result.error is not None:
                    raise result.error
                yield result
                if result.is_end:
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """No more results, and a consumer that waits goes on. No effect on a job that ended."""
        self._generator.drop(self)
        self._results.put_nowait(None)

    def deliver(self, result: Result) -> None:
        self._results.put_nowait(result)


class AsyncGenerator:
    """`async with AsyncGenerator(generator) as jobs`; leaving it drops all jobs."""

    def __init__(self, generator: DynamicGenerator) -> None:
        self.generator = generator
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exl-engine")
        self._turn = asyncio.Lock()  # whoever holds it may touch the generator
        self._jobs: dict[str, AsyncJob] = {}
        self._dropped: list[Job] = []
        self._loop_task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def __aenter__(self) -> AsyncGenerator:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def submit(self, request: Request, identifier: object = None) -> AsyncJob:
        """Check and queue; raises what the engine has against the request."""
        if self._is_closed:
            raise RequestError("the generator is closed", where=request.request_id)
        async with self._turn:
            loop = asyncio.get_running_loop()
            job = await loop.run_in_executor(
                self._thread, self.generator.enqueue, request, identifier
            )
            job_face = AsyncJob(self, job)
            self._jobs[request.request_id] = job_face
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())
        return job_face

    def drop(self, job_face: AsyncJob) -> None:
        """Forget the job; the engine does before its next step."""
        if self._jobs.pop(job_face.job.request.request_id, None) is not None:
            self._dropped.append(job_face.job)

    async def close(self) -> None:
        """Drop all jobs and stop. May be called again."""
        self._is_closed = True
        for job_face in list(self._jobs.values()):
            job_face.cancel()
        if self._loop_task is not None:
            await self._loop_task
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        """Steps until no job is left."""
        loop = asyncio.get_running_loop()
        while self._jobs or self._dropped:
            async with self._turn:
                results = await loop.run_in_executor(self._thread, self._step)
            for result in results:
                job_face = self._jobs.get(result.job.request.request_id)
                if job_face is None:
                    continue  # cancelled while the step ran
                if result.is_end:
                    del self._jobs[result.job.request.request_id]
                job_face.deliver(result)

    def _step(self) -> list[Result]:
        while self._dropped:
            self.generator.cancel(self._dropped.pop())
        try:
            return self.generator.iterate()
        except Exception:  # noqa: BLE001 - the next step hands it to every job that ran
            return []
