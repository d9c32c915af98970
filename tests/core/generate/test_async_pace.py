"""Engine thread of AsyncGenerator: its lead over the event loop, and notification of listeners."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from exl_core.engine.engine import EngineOptions
from exl_core.generate.asynchronous import AsyncGenerator, AsyncJob
from exl_core.generate.dynamic import DynamicGenerator
from support.generators import GREEDY, LIMIT_S, loaded_around
from support.scripted import ScriptedModel, always, certain


def endless() -> tuple[DynamicGenerator, ScriptedModel]:
    loaded = loaded_around(always(certain(ord("a"))))
    options = EngineOptions(cache_tokens=2048, max_batch=4)
    return DynamicGenerator(loaded, options), cast(Any, loaded.model)


async def submit(jobs: AsyncGenerator, max_tokens: int) -> AsyncJob:
    return await jobs.submit(jobs.generator.request("Q:", max_tokens=max_tokens, sampler=GREEDY))


def taken(job: AsyncJob) -> str:
    text = ""
    while (result := job.take()) is not None:
        text += result.text
    return text


def test_the_engine_runs_at_most_a_few_steps_ahead_of_a_blocked_loop() -> None:
    generator, model = endless()

    async def script() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncGenerator(generator) as jobs:
            job = await submit(jobs, 400)
            while not taken(job):
                await asyncio.sleep(0.001)
            before = len(model.rows_of_pass)
            time.sleep(0.3)  # blocks the event loop, so that no result is delivered
            assert before < len(model.rows_of_pass) <= before + 3
            await job.ended()
            assert job.job.text == "a" * 400

    asyncio.run(script())


def test_a_listener_is_called_for_every_result_and_the_end() -> None:
    generator, _ = endless()

    async def script() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncGenerator(generator) as jobs:
            job = await submit(jobs, 20)
            text = ""
            over = asyncio.Event()

            def hear() -> None:
                nonlocal text
                assert not over.is_set(), "no call after the end"
                text += taken(job)
                if job.has_ended:
                    over.set()

            job.listen(hear)
            await over.wait()
            assert text == "a" * 20
            late = await submit(jobs, 5)
            await late.ended()
            await late.ended()
            assert taken(late) == "aaaaa" and taken(late) == ""

    asyncio.run(script())


def test_take_raises_the_error_of_a_failed_job() -> None:
    generator, model = endless()

    async def script() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncGenerator(generator) as jobs:
            job = await submit(jobs, 900)
            model.failure = RuntimeError("broken")
            await job.ended()
            with pytest.raises(RuntimeError, match="broken"):
                taken(job)

    asyncio.run(script())
