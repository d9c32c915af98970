"""AsyncGenerator: concurrent, cancelled and failing consumers. Every wait has a time limit."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.limits import CompileLimits
from exl_core.constrain.regex import Regex
from exl_core.engine.engine import EngineOptions
from exl_core.errors import ConstraintError, ExlError, RequestError
from exl_core.generate.asynchronous import AsyncGenerator, AsyncJob
from exl_core.generate.dynamic import DynamicGenerator, Stage
from support.generators import GREEDY, LIMIT_S, assert_empty, loaded_around
from support.schemas import SLOW_SCHEMA
from support.scripted import EOS_ID, HashRule, always, certain, reply_with


def generator_for(rule: Any = None, **options: Any) -> DynamicGenerator:
    settings = {"cache_tokens": 2048, "max_batch": 4, **options}
    return DynamicGenerator(loaded_around(rule or reply_with("hello")), EngineOptions(**settings))


def endless(**options: Any) -> DynamicGenerator:
    return generator_for(always(certain(ord("a"))), **options)


def run(script: Callable[[], Coroutine[Any, Any, None]]) -> None:
    complaints: list[dict[str, Any]] = []

    async def limited() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        async with asyncio.timeout(LIMIT_S):
            await script()
        for _ in range(3):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {cast(Any, asyncio.current_task())}
        assert not left, "all tasks must have ended"

    asyncio.run(limited())
    gc.collect()  # coroutines and exceptions that were never awaited are reported here
    assert not complaints


async def text_of(job: AsyncJob) -> str:
    return "".join([result.text async for result in job])


async def submit(jobs: AsyncGenerator, prompt: str = "Q:", **settings: Any) -> AsyncJob:
    settings = {"stop": EOS_ID, "sampler": GREEDY, "max_tokens": 40, **settings}
    return await jobs.submit(jobs.generator.request(prompt, **settings))


def test_results_are_read_from_a_submission_directly() -> None:
    generator = generator_for(reply_with("hello"))

    async def story() -> None:
        async with AsyncGenerator(generator) as jobs:
            request = generator.request("Q:", sampler=GREEDY, max_tokens=40)
            assert "".join([one.text async for one in jobs.submit(request)]) == "hello"
            async for _ in jobs.submit(generator.request("Q:", sampler=GREEDY, max_tokens=40)):
                break  # cancels the job, once the loop has closed the iterator
            for _ in range(5):
                await asyncio.sleep(0)
            assert jobs.num_remaining_jobs == 0

    run(story)


def test_concurrent_consumers_get_their_own_results_in_order() -> None:
    generator = generator_for(HashRule(5))
    alone = [
        generator.generate(f"{i}:", max_tokens=15, sampler=GREEDY, completion_only=True)
        for i in range(9)
    ]

    async def consume(jobs: AsyncGenerator, number: int) -> str:
        job = await jobs.submit(
            jobs.generator.request(f"{number}:", max_tokens=15, sampler=GREEDY), identifier=number
        )
        results = [result async for result in job]
        assert {result.job.identifier for result in results} == {number}
        assert [result.stage for result in results] == sorted(
            (result.stage for result in results), key=list(Stage).index
        )
        assert [result.is_end for result in results].index(True) == len(results) - 1
        assert results[-1].finish is not None
        assert results[-1].finish.text == "".join(result.text for result in results)
        return results[-1].finish.text

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            texts = await asyncio.gather(*(consume(jobs, i) for i in range(9)))
            assert texts == alone
            assert jobs.num_remaining_jobs == 0

    run(script)
    assert_empty(generator)


def test_cancelling_a_consumer_cancels_only_its_job() -> None:
    generator = endless()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            seen = asyncio.Event()

            async def consume() -> None:
                async for result in await submit(jobs, "x" * 300, max_tokens=900):
                    if result.text:
                        seen.set()

            task = asyncio.create_task(consume())
            other = await submit(jobs, max_tokens=60)
            await seen.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await text_of(other) == "a" * 60
            assert jobs.num_remaining_jobs == 0
            assert_empty(generator)

    run(script)


def test_leaving_the_loop_of_a_job_cancels_it() -> None:
    generator = endless()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            async for result in await submit(jobs, max_tokens=900):
                if result.text:
                    break
            with pytest.raises(ZeroDivisionError):
                async for _ in await submit(jobs, max_tokens=900):
                    raise ZeroDivisionError
            while jobs.num_remaining_jobs:
                await asyncio.sleep(0.001)
            assert await text_of(await submit(jobs, max_tokens=5)) == "aaaaa"
            assert_empty(generator)

    run(script)


def test_an_unread_job_does_not_block_others_and_keeps_its_results() -> None:
    generator = generator_for()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            late = await submit(jobs)
            await submit(jobs)  # no reference to this job is kept
            assert await text_of(await submit(jobs)) == "hello"
            while not late.has_ended:
                await asyncio.sleep(0.001)
            late.cancel()  # no effect, because the job has ended
            assert await text_of(late) == "hello"
            assert await text_of(late) == "", "results can be read once"

    run(script)
    assert_empty(generator)


@pytest.mark.parametrize("is_reader_first", [True, False])
def test_others_wait_for_the_end_of_a_job_that_is_read(is_reader_first: bool) -> None:
    generator = generator_for()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            job = await submit(jobs)
            texts: list[str] = []

            async def read() -> None:
                texts.append(await text_of(job))

            waits = [read(), job.ended(), job.ended()]
            await asyncio.gather(*(waits if is_reader_first else reversed(waits)))
            assert texts == ["hello"]

    run(script)
    assert_empty(generator)


def test_a_second_loop_over_a_job_is_refused() -> None:
    generator = generator_for()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            job = await submit(jobs)
            read = await asyncio.gather(text_of(job), text_of(job), return_exceptions=True)
            assert read[0] == "hello"
            assert isinstance(read[1], RequestError)
            assert "another loop reads the results" in str(read[1])

    run(script)
    with pytest.raises(RequestError, match=r"generator .*DynamicGenerator.*got 5"):
        AsyncGenerator(5)  # type: ignore[arg-type]


def test_cancelling_from_another_task_and_twice() -> None:
    generator = endless()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            job = await submit(jobs, max_tokens=900)
            reading = asyncio.create_task(text_of(job))
            while not job.job.text:
                await asyncio.sleep(0.001)
            job.cancel()
            job.cancel()
            assert set(await reading) <= {"a"}
            assert job.job.finish is None
            unread = await submit(jobs, max_tokens=900)
            unread.cancel()
            assert await text_of(unread) == ""
            ended = await submit(jobs, max_tokens=2)
            assert await text_of(ended) == "aa"
            ended.cancel()
            ended.cancel()

    run(script)
    assert_empty(generator)


def test_a_request_id_is_free_right_after_cancelling() -> None:
    generator = generator_for()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            for _ in range(20):
                job = await submit(jobs, request_id="mine")
                with pytest.raises(RequestError, match="this id"):
                    await submit(jobs, request_id="mine")
                job.cancel()
            assert await text_of(await submit(jobs, request_id="mine")) == "hello"

    run(script)
    assert_empty(generator)


def test_a_failed_step_ends_its_jobs_and_later_jobs_run() -> None:
    generator = endless(max_batch=2)
    failure = RuntimeError("broken")

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            ran = [await submit(jobs, max_tokens=900) for _ in range(2)]
            waits = await submit(jobs, max_tokens=3)
            while not all(job.job.text for job in ran):
                await asyncio.sleep(0.001)
            cast(Any, generator.loaded.model).failure = failure
            for job in ran:
                with pytest.raises(RuntimeError, match="broken"):
                    await text_of(job)
                assert job.job.error is failure
            assert await text_of(waits) == "aaa"
            assert await text_of(await submit(jobs, max_tokens=4)) == "aaaa"

    run(script)
    assert_empty(generator)


def test_a_permanently_broken_engine_fails_every_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = generator_for()

    def broken() -> None:
        raise RuntimeError("for good")

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            with monkeypatch.context() as patch:
                patch.setattr(generator.engine.scheduler, "prepare", broken)
                waiting = [await submit(jobs) for _ in range(3)]
                for job in waiting:
                    with pytest.raises(RuntimeError, match="for good"):
                        await text_of(job)
                with pytest.raises(RuntimeError, match="for good"):
                    await text_of(await submit(jobs))
            assert await text_of(await submit(jobs)) == "hello"

    run(script)
    assert_empty(generator)


def test_an_interrupt_in_the_engine_thread_becomes_an_error_of_its_jobs() -> None:
    generator = generator_for()

    def interrupt(_token: object) -> None:
        raise KeyboardInterrupt

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            with pytest.raises(ExlError, match="interrupted"):
                await text_of(await submit(jobs, hooks=interrupt))
            assert await text_of(await submit(jobs)) == "hello"

    run(script)


def test_a_bad_request_is_refused_by_submit() -> None:
    generator = generator_for()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            for wrong in ({"prompt": "x" * 3000}, {"constraints": Regex("[")}):
                with pytest.raises(RequestError):
                    await submit(jobs, **cast(Any, wrong))
            with pytest.raises(RequestError, match="not a request"):
                await jobs.submit(cast(Any, "text"))
            assert jobs.num_remaining_jobs == 0
            assert await text_of(await submit(jobs)) == "hello"

    run(script)
    assert_empty(generator)


def test_compiling_a_constraint_blocks_neither_jobs_nor_event_loop() -> None:
    """Constraints are compiled outside the event loop and outside the engine's thread."""
    generator = endless(compile_limits=CompileLimits(time_s=1.0))

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            other = await submit(jobs, max_tokens=1900)
            refused = asyncio.create_task(submit(jobs, constraints=JsonSchema(SLOW_SCHEMA)))
            await asyncio.sleep(0)
            during = 0
            while not refused.done():
                before = other.job.num_tokens
                await asyncio.sleep(0.02)
                during += other.job.num_tokens > before
            with pytest.raises(ConstraintError, match="at most 1 s"):
                await refused
            assert during or other.has_ended
            assert jobs.num_remaining_jobs == (0 if other.has_ended else 1)
            other.cancel()
            text = await text_of(await submit(jobs, constraints=Regex("a{3}")))
            assert text == "aaa"

    run(script)
    assert_empty(generator)


def test_closing_and_cancelling_do_not_wait_for_a_slow_constraint() -> None:
    generator = endless(compile_limits=CompileLimits(time_s=2.0))

    async def script() -> None:
        jobs = AsyncGenerator(generator)
        slow = [
            asyncio.create_task(submit(jobs, constraints=JsonSchema(SLOW_SCHEMA))) for _ in range(8)
        ]
        await asyncio.sleep(0.1)
        assert slow[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow[0]
        started = time.monotonic()
        await jobs.close()
        assert time.monotonic() - started < 10, "queued constraints must not be compiled"
        for outcome in await asyncio.gather(*slow[1:], return_exceptions=True):
            assert isinstance(outcome, RequestError)

    run(script)
    assert_empty(generator)


def test_work_runs_on_the_engines_thread_between_steps() -> None:
    async def script() -> None:
        async with AsyncGenerator(endless()) as jobs:
            assert await jobs.between_steps(lambda: threading.current_thread().name) != "MainThread"
            job = await submit(jobs, max_tokens=50)
            names = [
                await jobs.between_steps(lambda: threading.current_thread().name) for _ in range(5)
            ]
            assert len(set(names)) == 1 and names[0].startswith("exl-engine")
            with pytest.raises(ZeroDivisionError):
                await jobs.between_steps(lambda: 1 // 0)
            assert len(await text_of(job)) == 50, "the job goes on"
        with pytest.raises(RequestError, match="closed"):
            await jobs.between_steps(lambda: None)

    run(script)


def test_closing_ends_running_jobs_and_refuses_new_ones() -> None:
    generator = endless()

    async def script() -> None:
        jobs = AsyncGenerator(generator)
        reading = [
            asyncio.create_task(text_of(await submit(jobs, max_tokens=900))) for _ in range(6)
        ]
        await asyncio.sleep(0.01)
        await asyncio.gather(jobs.close(), jobs.close())
        for task in reading:
            assert set(await task) <= {"a"}
        with pytest.raises(RequestError, match="closed"):
            await submit(jobs)
        await jobs.close()

    run(script)
    assert_empty(generator)
    assert generator.generate("Q:", max_tokens=3) == "Q:aaa", "the generator is still usable"


def test_submitting_during_close_is_refused() -> None:
    generator = endless()

    async def script() -> None:
        jobs = AsyncGenerator(generator)
        await submit(jobs, max_tokens=900)
        coming = [asyncio.create_task(submit(jobs)) for _ in range(5)]
        await asyncio.sleep(0)
        await jobs.close()
        for outcome in await asyncio.gather(*coming, return_exceptions=True):
            assert isinstance(outcome, RequestError)

    run(script)
    assert_empty(generator)


def test_a_cancelled_submit_leaves_no_job() -> None:
    generator = endless()

    async def none_left() -> None:
        while generator.num_remaining_jobs:
            await asyncio.sleep(0.001)

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            for rounds in range(5):
                task = asyncio.create_task(submit(jobs, max_tokens=900))
                for _ in range(rounds):
                    await asyncio.sleep(0)
                if not task.cancel():  # the engine has already accepted the job
                    assert rounds > 1
                    continue
                with pytest.raises(asyncio.CancelledError):
                    await task
            await none_left()
            assert await text_of(await submit(jobs, max_tokens=2)) == "aa"

            task = asyncio.create_task(submit(jobs, max_tokens=900))
            await asyncio.sleep(0)  # the task sends its request to the engine
            while not generator.num_remaining_jobs:
                threading.Event().wait(0.001)
            assert task.cancel(), "the task cannot have resumed while this loop was blocked"
            with pytest.raises(asyncio.CancelledError):
                await task
            await none_left()

    run(script)
    assert_empty(generator)


def test_jobs_that_end_at_once_are_delivered() -> None:
    generator = generator_for()

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            for _ in range(50):  # submits race with the end of the engine's steps
                assert await text_of(await submit(jobs, max_tokens=0)) == ""
                assert await text_of(await submit(jobs, max_tokens=1)) == "h"
                await asyncio.sleep(0)

    run(script)
    assert_empty(generator)


def test_random_mix_of_finished_abandoned_and_cancelled_jobs() -> None:
    generator = endless(max_batch=3)

    async def live(jobs: AsyncGenerator, number: int) -> None:
        for turn in range(4):
            job = await submit(jobs, "x" * (number * 40 + turn), max_tokens=4 + 7 * turn)
            count = 0
            async for result in job:
                count += len(result.text)
                if count > 5 + number:
                    break
            if (number + turn) % 3 == 0:
                await asyncio.sleep(0)

    async def script() -> None:
        async with AsyncGenerator(generator) as jobs:
            tasks = [asyncio.create_task(live(jobs, i)) for i in range(12)]
            for i, task in enumerate(tasks):
                await asyncio.sleep(0.002)
                if i % 4 == 3:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(script)
    assert_empty(generator)


def test_an_async_generator_works_in_successive_event_loops() -> None:
    generator = generator_for()
    jobs = AsyncGenerator(generator)

    async def script() -> None:
        assert await text_of(await submit(jobs)) == "hello"

    run(script)
    run(script)
    run(jobs.close)
