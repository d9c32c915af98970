"""The dynamic generator for asyncio: jobs are awaited, engine steps run on a thread of their own.

All calls come from one event loop. Every access to the engine (enqueue, cancel, step) runs on that
one thread, in the order of the calls. The thread starts the next step by itself, at most one step
ahead of the results that the loop has received: waiting for the loop between two steps would cost
two thread switches per step. The loop's side tracks which jobs are live and which results they got.

A consumer that is cancelled or leaves its loop cancels its own job only. A slow consumer delays no
other job. A step that raises ends the jobs that ran with its error; later jobs run normally.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from exl_core.constrain.filter import Filter
from exl_core.constrain.trial import MAX_PROCESSES
from exl_core.engine.request import Request
from exl_core.errors import ExlError, RequestError
from exl_core.generate.dynamic import DynamicGenerator, Job, Result, Stage, check_request
from exl_core.session.request_fields import check_argument

T = TypeVar("T")

_POLL_S = 0.5
"""Interval at which the engine's thread checks that an event loop that takes no results runs."""


class AsyncJob:
    """Results of one request: `async for result in job`, in one loop. Others may wait for its end.

    The last result has `finish`. If the job fails, iteration raises its error. It ends early after
    `cancel`, or when the generator is closed. A job without a consumer runs to its end.
    """

    def __init__(self, generator: AsyncGenerator, job: Job) -> None:
        self.job = job
        self.has_ended = False
        """No further result is added to the queue."""
        self._generator = generator
        self._results: deque[Result] = deque()
        self._listener: Callable[[], None] | None = None
        self._waiting: list[Callable[[], None]] = []  # one for each call of `_wait`
        self._is_read = False

    async def __aiter__(self) -> AsyncIterator[Result]:
        if self._is_read:
            raise RequestError(
                "another loop reads the results of this job", where=self.job.request.request_id
            )
        self._is_read = True
        try:
            while True:
                while (result := self.take()) is not None:
                    yield result
                if self.has_ended:
                    return
                await self._wait(for_end=False)
        finally:
            self._is_read = False
            self.cancel()

    async def ended(self) -> None:
        """Wait for the end of the job. Its results stay available through `take`."""
        if not self.has_ended:
            await self._wait(for_end=True)

    def take(self) -> Result | None:
        """The next result that has arrived, or None. Raises the error of a job that failed."""
        if not self._results:
            return None
        result = self._results.popleft()
        if result.error is not None:
            raise _raisable(result.error)
        return result

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` from the event loop after each result and after the end.

        This is cheaper than waking a task for each result. The listener must not raise.
        """
        self._listener = listener

    def cancel(self) -> None:
        """End the job without further results and wake its consumer. No effect after its end."""
        if not self.has_ended:
            self._results.clear()
            self.abandon()
            self._generator.drop(self)

    def abandon(self) -> None:
        """Mark the job as ended. Results that have arrived can still be read."""
        self.has_ended = True
        self._notify()

    def deliver(self, result: Result) -> None:
        if self.has_ended:
            return  # cancelled while the step ran
        self._results.append(result)
        self.has_ended = result.is_end
        self._notify()

    def _notify(self) -> None:
        for listener in self._waiting:
            listener()
        if self._listener is not None:
            self._listener()

    async def _wait(self, *, for_end: bool) -> None:
        """Wait for the next result, or only for the end."""
        arrived = asyncio.get_running_loop().create_future()

        def listener() -> None:
            if (self.has_ended or not for_end) and not arrived.done():
                arrived.set_result(None)

        self._waiting.append(listener)
        try:
            await arrived
        finally:
            self._waiting.remove(listener)


class Submission(Awaitable[AsyncJob]):
    """A request that is being queued: `async for result in ...`, or `await` for its `AsyncJob`."""

    def __init__(self, queued: Coroutine[Any, Any, AsyncJob]) -> None:
        self._queued = queued

    def __await__(self) -> Generator[Any, None, AsyncJob]:
        return self._queued.__await__()

    async def __aiter__(self) -> AsyncIterator[Result]:
        job = await self._queued
        try:
            async for result in job:
                yield result
        finally:
            job.cancel()


class AsyncGenerator:
    """`async with AsyncGenerator(generator) as jobs`; leaving the block cancels all jobs.

    Meanwhile the dynamic generator may be used for nothing else, except to make requests.
    """

    def __init__(self, generator: DynamicGenerator) -> None:
        check_argument("generator", generator, DynamicGenerator, "For example DynamicGenerator(m).")
        self.generator = generator
        self._is_closed = False
        # Used by the event loop's thread.
        self._live: set[AsyncJob] = set()
        self._starting: set[asyncio.Future[Any]] = set()  # they wait for the engine's thread
        self._running: asyncio.Task[None] | None = None
        self._returned_at = time.monotonic()
        # Used by the engine's thread until it has ended; `_dropped` is shared by both threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exl-engine")
        self._is_thread_gone = False
        # Threads that compile constraints, one for each process that tries them.
        self._compilers = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="exl-compile")
        self._handles: dict[Job, AsyncJob] = {}
        self._dropped: deque[Job] = deque()  # cancelled by the loop, not yet in the engine

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
        """Seconds since the engine's thread last returned a result, if work is pending on it."""
        return time.monotonic() - self._returned_at if self._pending() else 0.0

    def submit(self, request: Request, identifier: object = None) -> Submission:
        """Check the request and queue it; raises RequestError if the engine refuses it.

        `async for result in jobs.submit(request)` reads the results. `await jobs.submit(request)`
        gives the `AsyncJob`, to cancel it or to wait for its end.
        """
        return Submission(self._submit(request, identifier))

    async def _submit(self, request: Request, identifier: object) -> AsyncJob:
        self._check_open(request)
        check_request(request)
        loop = asyncio.get_running_loop()
        filters: tuple[Filter, ...] = ()
        if request.constraints:
            filters = await loop.run_in_executor(self._compilers, self._compile, request)
            self._check_open(request)
        if not self._pending():
            self._returned_at = time.monotonic()
        starting = loop.run_in_executor(self._thread, self._enqueue, request, filters, identifier)
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            job = await asyncio.shield(starting)
        except asyncio.CancelledError:  # the engine's thread still enqueues the request
            starting.add_done_callback(_abandon)
            raise
        if self._is_closed:
            job.cancel()
        self._check_open(request)
        if not job.has_ended:  # the job may have ended in a step before this line
            self._live.add(job)
            self._wake()
        return job

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Result of `work`, which runs on the engine's thread between two steps.

        For short work that uses the model, such as one more pass. All jobs wait for it.
        """
        if self._is_closed:
            raise RequestError("the generator is closed")
        if not self._pending():
            self._returned_at = time.monotonic()
        waiting = asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._starting.add(waiting)
        waiting.add_done_callback(self._starting.discard)
        return await asyncio.shield(waiting)

    def drop(self, job: AsyncJob) -> None:
        """Forget a job without a consumer; the engine cancels it before its next step."""
        self._live.discard(job)
        self._dropped.append(job.job)
        self._wake()

    async def close(self) -> None:
        """Cancel all jobs and end the engine's thread. May be called again."""
        self._is_closed = True
        for job in list(self._live):
            job.cancel()
        while pending := self._pending():
            await asyncio.wait(pending)
        self._thread.shutdown()
        await asyncio.to_thread(self._compilers.shutdown)  # a few seconds at most
        self._is_thread_gone = True
        self._discard()

    def _check_open(self, request: Request) -> None:
        if self._is_closed:
            raise RequestError("the generator is closed", where=request.request_id)

    def _pending(self) -> set[asyncio.Future[Any]]:
        """Futures that the engine's thread has not completed."""
        pending: set[asyncio.Future[Any]] = {*self._starting}
        if self._running is not None and not self._running.done():
            pending.add(self._running)
        return pending

    def _wake(self) -> None:
        """Make sure that a task runs engine steps and cancellations."""
        if self._is_thread_gone:
            self._discard()
        elif self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Run steps until no job is left.

        Nothing is awaited between the last check and the return, so that a later `_wake` finds the
        task done and starts a new one.
        """
        loop = asyncio.get_running_loop()
        try:
            self._returned_at = time.monotonic()
            while self._live or self._dropped:
                self._deliver(await loop.run_in_executor(self._thread, self._steps, loop))
        finally:
            left, self._live = self._live, set()
            for job in left:  # not empty only if this task was cancelled
                self._dropped.append(job.job)
                job.abandon()

    def _deliver(self, results: JobResults, slots: threading.Semaphore | None = None) -> None:
        self._returned_at = time.monotonic()
        for job, result in results:
            job.deliver(result)
            if result.is_end:
                self._live.discard(job)
        if slots is not None:
            slots.release()

    def _steps(self, loop: asyncio.AbstractEventLoop) -> JobResults:
        """Run steps until no job is left, or until a request waits for this thread.

        The last step's results are returned; earlier ones are delivered as they arise.
        """
        slots = threading.Semaphore(2)  # one running step, and one that is not delivered yet
        while True:
            while not slots.acquire(timeout=_POLL_S):
                if not loop.is_running():
                    return []  # the loop was stopped and may never run again
            results = self._step()
            if not self._handles or self._starting:
                return results
            loop.call_soon_threadsafe(self._deliver, results, slots)

    def _compile(self, request: Request) -> tuple[Filter, ...]:
        self._check_open(request)  # requests that wait here while `close` runs are not compiled
        return self.generator.engine.compile(request)

    def _enqueue(
        self, request: Request, filters: tuple[Filter, ...], identifier: object
    ) -> AsyncJob:
        self._discard()  # first, since the request id of a dropped job may be used again
        job = self.generator.enqueue_compiled(request, filters, identifier)
        handle = self._handles[job] = AsyncJob(self, job)
        return handle

    def _step(self) -> JobResults:
        self._discard()
        engine = self.generator.engine
        before = engine.live_requests
        try:
            results = self.generator.iterate()
        except BaseException as error:  # noqa: BLE001 - delivered to the jobs, here or by the next step
            if engine.live_requests != before:
                return []  # the next step delivers the error to the jobs that ran
            results = [Result(job, Stage.STREAMING, error=error) for job in self._handles]
            for job in self._handles:
                self.generator.cancel(job)
        delivered = [(self._handles[one.job], one) for one in results if one.job in self._handles]
        for result in results:
            if result.is_end:
                self._handles.pop(result.job, None)
        return delivered

    def _discard(self) -> None:
        while self._dropped:
            job = self._dropped.popleft()
            self._handles.pop(job, None)
            self.generator.cancel(job)


JobResults = list[tuple[AsyncJob, Result]]


def _abandon(starting: asyncio.Future[AsyncJob]) -> None:
    """Cancel a job whose `submit` was cancelled before it returned."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().cancel()


def _raisable(error: BaseException) -> BaseException:
    """The error to raise in the consumer's task.

    An error that is no `Exception`, such as KeyboardInterrupt on the engine's thread, is wrapped:
    asyncio would take it for an interrupt or a cancellation of the consumer's task.
    """
    if isinstance(error, Exception):
        return error
    wrapped = ExlError("the request was interrupted", got=repr(error))
    wrapped.__cause__ = error
    return wrapped
