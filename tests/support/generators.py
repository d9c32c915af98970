"""Scripted models as loaded models, and a common way to get a reply from each generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishEvent, SampledToken, TextEvent
from exl_core.errors import RequestError
from exl_core.generate.asynchronous import AsyncGenerator
from exl_core.generate.base import BaseGenerator
from exl_core.generate.driver import stream
from exl_core.generate.dynamic import DynamicGenerator, Result
from exl_core.generate.generator import Generator
from exl_core.generate.streaming import StreamingGenerator, StreamResult
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from support.scripted import EOS_ID, ByteTokenizer, Rule, ScriptedModel, ScriptedShape

GREEDY = SamplerParams(temperature=0)
SMALL = EngineOptions(cache_tokens=1024)
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Shape(ScriptedShape):
    eos_ids: tuple[int, ...] = (EOS_ID,)


def loaded_around(rule: Rule, *, max_seq_len: int = 1024) -> LoadedModel:
    shape = Shape(max_seq_len=max_seq_len)
    return LoadedModel(
        name="scripted",
        path=Path("scripted"),
        config=cast(Any, shape),
        model=cast(Any, ScriptedModel(rule, shape)),
        tokenizer=ByteTokenizer(),
        template=None,
        weights_bytes=0,
        load_s=0.0,
    )


class Counter:
    """Hook that counts tokens and calls `action` at token number `at`."""

    def __init__(self, at: int, action: Any) -> None:
        self.seen = 0
        self._at, self._action = at, action

    def __call__(self, token: SampledToken) -> None:
        self.seen += 1
        if self.seen == self._at:
            self._action()


def assert_empty(generator: Generator) -> None:
    """Checks that no request runs and no page is held."""
    if isinstance(generator, DynamicGenerator):
        assert generator.num_remaining_jobs == 0
    assert generator.engine.is_idle
    assert not generator.engine.pool.held_pages


@dataclass
class Reply:
    """Reply of a generator to one prompt. The base generator returns only the text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    suppressed: tuple[str, ...] = ()
    finish: FinishEvent | None = None

    def add(self, part: StreamResult | Result | TextEvent) -> None:
        self.text += part.chunk if isinstance(part, StreamResult) else part.text
        self.token_ids += part.token_ids
        self.tokens += part.tokens
        if not isinstance(part, TextEvent):
            self.suppressed += (part.suppressed,) if part.suppressed else ()
            self.finish = part.finish


@dataclass
class Driver:
    """A generator, and the function that gets a whole reply from it."""

    name: str
    generator: Any
    ask: Callable[..., Reply]

    def reply(self, prompt: Any, *, stop: Any = EOS_ID, **settings: Any) -> Reply:
        """Reply to one prompt. Raises the error that made the request fail."""
        return self.ask(self.generator, prompt, stop=stop, **{"max_tokens": 20, **settings})

    @property
    def model(self) -> ScriptedModel:
        return cast(ScriptedModel, self.generator.loaded.model)


def ask_base(
    generator: BaseGenerator, prompt: Any, *, stop: Any, max_tokens: int, **settings: Any
) -> Reply:
    stop_token = None if stop == () else stop
    text = generator.generate_simple(
        prompt, num_tokens=max_tokens, stop_token=stop_token, completion_only=True, **settings
    )
    return Reply(text)


def ask_streaming(generator: StreamingGenerator, prompt: Any, **settings: Any) -> Reply:
    reply = Reply()
    generator.begin(prompt, **settings)
    while reply.finish is None:
        try:
            reply.add(generator.step())
        except BaseException:
            with pytest.raises(RequestError, match="ended"):
                generator.step()
            raise
    return reply


def ask_dynamic(generator: DynamicGenerator, prompt: Any, **settings: Any) -> Reply:
    reply, job = Reply(), generator.enqueue(generator.request(prompt, **settings))
    try:
        while not job.is_finished:
            for result in generator.iterate():
                assert result.job is job
                reply.add(result)
    finally:
        generator.cancel(job)
    if job.error is not None:
        raise job.error
    return reply


def ask_async(generator: DynamicGenerator, prompt: Any, **settings: Any) -> Reply:
    reply = Reply()

    async def read() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncGenerator(generator) as jobs:
            async for result in await jobs.submit(generator.request(prompt, **settings)):
                reply.add(result)

    asyncio.run(read())
    return reply


def ask_stream(generator: Generator, prompt: Any, **settings: Any) -> Reply:
    """Reply from `stream`, the loop below the generators."""
    reply = Reply()
    for event in stream(generator.engine, generator.request(prompt, **settings)):
        if isinstance(event, TextEvent):
            reply.add(event)
        else:
            reply.finish = event
    return reply


WAYS: dict[str, tuple[type[Generator], Callable[..., Reply]]] = {
    "base": (BaseGenerator, ask_base),
    "streaming": (StreamingGenerator, ask_streaming),
    "dynamic": (DynamicGenerator, ask_dynamic),
    "async": (DynamicGenerator, ask_async),
    "stream": (Generator, ask_stream),
}


def driver(way: str, rule: Rule) -> Driver:
    kind, ask = WAYS[way]
    return Driver(way, kind(loaded_around(rule), SMALL), ask)
