"""The dynamic generator for asyncio: jobs are awaited, steps run on a thread of their own.

All calls come from one event loop. What touches the engine runs on that one thread, in the order
in which it was asked for: enqueue, cancel, step. It goes from one step to the next by itself, at
most one ahead of what the loop was told: waiting for the loop between two steps would cost every
one of them two changes of threads. The loop's side knows which jobs are live and what they were
told. A consumer that goes away, cancelled or by leaving its loop, takes its job with it and nothing
else; a slow one holds nobody up. A step that fails ends the jobs that ran with its error; later
ones run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from exl_core.engine.request import Request
from exl_core.errors import ExlError, RequestError
from exl_core.generate.dynamic import DynamicGenerator, Job, Result, Stage

_LOOK_S = 0.5
"""Between two looks whether a loop that is not told anything still runs."""


class AsyncJob:
    """Results of one request: `async for result in job`, once.

    The last result has `finish`. Raises what made the job fail. Ends early where `cancel` was
    called, or the generator was closed. Nobody has to listen: the job runs to its end.
    """

    def __init__(self, generator: AsyncGenerator, job: Job) -> None:
        self.job = job
        self.has_ended = False
        """Nothing is added to what waits here."""
        self._generator = generator
        self._results: deque[Result] = deque()
        self._listener: Callable[[], None] | None = None

    async def __aiter__(self) -> AsyncIterator[Result]:
        try:
            while True:
                while (result := self.take()) is not None:
                    yield result
                if self.has_ended:
                    return
                await self._heard(is_end=False)
        finally:
            self.cancel()

    async def ended(self) -> None:
        """Until nothing is added any more; what came waits for `take`."""
        if not self.has_ended:
            await self._heard(is_end=True)

    def take(self) -> Result | None:
        """The next result, if it is there. Raises what made the job fail."""
        if not self._results:
            return None
        result = self._results.popleft()
        if result.error is not None:
            raise _raisable(result.error)
        return result

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it after each result and after the end, from the event loop: cheaper than a task
        that is woken for each. It must not raise."""
        self._listener = listener

    def cancel(self) -> None:
        """No more results, and a consumer that waits goes on. No effect on a job that ended."""
        if not self.has_ended:
            self._results.clear()
            self.abandon()
            self._generator.drop(self)

    def abandon(self) -> None:
        """Nothing more comes. What came can still be read."""
        self.has_ended = True
        self._tell()

    def deliver(self, result: Result) -> None:
        if self.has_ended:
            return  # cancelled while the step ran
        self._results.append(result)
        self.has_ended = result.is_end
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener()

    async def _heard(self, *, is_end: bool) -> None:
        """Until the next result, or the end."""
        news = asyncio.get_running_loop().create_future()

        def hear() -> None:
            if (self.has_ended or not is_end) and not news.done():
                news.set_result(None)

        self.listen(hear)
        await news


class AsyncGenerator:
    """`async with AsyncGenerator(generator) as jobs`; leaving it drops all jobs.

    The generator is not to be used otherwise meanwhile, but for making requests.
    """

    def __init__(self, generator: DynamicGenerator) -> None:
        self.generator = generator
        self._is_closed = False
        # The loop's side.
        self._live: set[AsyncJob] = set()
        self._starting: set[asyncio.Future[AsyncJob]] = set()
        self._running: asyncio.Task[None] | None = None
        self._moved_at = time.monotonic()
        # The engine's side: these, but for `_dropped`, belong to its thread until that is gone.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exl-engine")
        self._is_thread_gone = False
        self._faces: dict[Job, AsyncJob] = {}
        self._dropped: deque[Job] = deque()  # handed over from one side to the other

    async def __aenter__(self) -> AsyncGenerator:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def num_remaining_jobs(self) -> int:
        """Live jobs, waiting or running."""
        return len(self._live)

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine's thread last came back, while something is asked of it."""
        return time.monotonic() - self._moved_at if self._pending() else 0.0

    async def submit(self, request: Request, identifier: object = None) -> AsyncJob:
        """Check and queue; raises what the engine has against the request."""
        self._check_open(request)
        loop = asyncio.get_running_loop()
        if not self._pending():
            self._moved_at = time.monotonic()
        starting = loop.run_in_executor(self._thread, self._enqueue, request, identifier)
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            job = await asyncio.shield(starting)
        except asyncio.CancelledError:  # the thread goes on all the same
            starting.add_done_callback(_abandon)
            raise
        if self._is_closed:
            job.cancel()
        self._check_open(request)
        if not job.has_ended:  # the first step may have been quicker
            self._live.add(job)
            self._wake()
        return job

    def drop(self, job: AsyncJob) -> None:
        """Forget a job that has no consumer; the engine does before its next step."""
        self._live.discard(job)
        self._dropped.append(job.job)
        self._wake()

    async def close(self) -> None:
        """Drop all jobs and stop. May be called again."""
        self._is_closed = True
        for job in list(self._live):
            job.cancel()
        while pending := self._pending():
            await asyncio.wait(pending)
        self._thread.shutdown()
        self._is_thread_gone = True
        self._discard()

    def _check_open(self, request: Request) -> None:
        if self._is_closed:
            raise RequestError("the generator is closed", where=request.request_id)

    def _pending(self) -> set[asyncio.Future[Any]]:
        """What has not returned from the engine's thread."""
        pending: set[asyncio.Future[Any]] = {*self._starting}
        if self._running is not None and not self._running.done():
            pending.add(self._running)
        return pending

    def _wake(self) -> None:
        """Whatever was asked for will be done."""
        if self._is_thread_gone:
            self._discard()
        elif self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Steps until no job is left. Nothing is awaited between the last look and the return, so
        that whoever comes later finds it done and starts it again."""
        loop = asyncio.get_running_loop()
        try:
            self._moved_at = time.monotonic()
            while self._live or self._dropped:
                self._tell(await loop.run_in_executor(self._thread, self._steps, loop))
        finally:
            left, self._live = self._live, set()
            for job in left:  # there are some only if this task was cancelled
                self._dropped.append(job.job)
                job.abandon()

    def _tell(self, news: News, room: threading.Semaphore | None = None) -> None:
        self._moved_at = time.monotonic()
        for job, result in news:
            job.deliver(result)
            if result.is_end:
                self._live.discard(job)
        if room is not None:
            room.release()

    def _steps(self, loop: asyncio.AbstractEventLoop) -> News:
        """Until no job is left, or somebody waits for this thread to take a request. The last one's
        news are returned, those before are told as they come."""
        room = threading.Semaphore(2)  # for one step that runs, and one that is not told of yet
        while True:
            while not room.acquire(timeout=_LOOK_S):
                if not loop.is_running():
                    return []  # and may never again
            news = self._step()
            if not self._faces or self._starting:
                return news
            loop.call_soon_threadsafe(self._tell, news, room)

    def _enqueue(self, request: Request, identifier: object) -> AsyncJob:
        self._discard()  # a dropped job's request id may be used again
        job = self.generator.enqueue(request, identifier)
        face = self._faces[job] = AsyncJob(self, job)
        return face

    def _step(self) -> News:
        self._discard()
        engine = self.generator.engine
        before = engine.live_requests
        try:
            results = self.generator.iterate()
        except BaseException as error:  # noqa: BLE001 - handed to the jobs, by now or by the next step
            if engine.live_requests != before:
                return []  # the next step tells those that ran
            results = [Result(job, Stage.STREAMING, error=error) for job in self._faces]
            for job in self._faces:
                self.generator.cancel(job)
        news = [(self._faces[one.job], one) for one in results if one.job in self._faces]
        for result in results:
            if result.is_end:
                self._faces.pop(result.job, None)
        return news

    def _discard(self) -> None:
        while self._dropped:
            job = self._dropped.popleft()
            self._faces.pop(job, None)
            self.generator.cancel(job)


News = list[tuple[AsyncJob, Result]]


def _abandon(starting: asyncio.Future[AsyncJob]) -> None:
    """Whoever asked for the job was cancelled before they got it."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().cancel()


def _raisable(error: BaseException) -> BaseException:
    """An interrupt of the engine's thread must not be taken for one of the consumer's task."""
    if isinstance(error, Exception):
        return error
    wrapped = ExlError("the request was interrupted", got=repr(error))
    wrapped.__cause__ = error
    return wrapped
