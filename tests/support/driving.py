"""Helpers that run requests on an engine with a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from exl_core.arch.layers import StateShape
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import (
    Event,
    FailEvent,
    FinishEvent,
    PrefillEvent,
    RewindEvent,
    StartEvent,
    TextEvent,
)
from exl_core.engine.request import Request
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import Drafter
from exl_core.tokenizer.base import Tokenizer
from support.scripted import EOS_ID, ByteTokenizer, Rule, ScriptedModel, ScriptedShape

GREEDY = SamplerParams(temperature=0)


def engine_for(
    rule: Rule,
    *,
    max_seq_len: int = 2048,
    tokenizer: Tokenizer | None = None,
    drafter: Drafter | None = None,
    clock: Callable[[], float] = perf_counter,
    is_hybrid: bool = False,
    **options: object,
) -> Engine:
    """`is_hybrid`: the model has a recurrent state, too."""
    tokenizer = tokenizer or ByteTokenizer()
    states = (StateShape((1, 1)),) if is_hybrid else ()
    shape = ScriptedShape(tokenizer.vocab_size, max_seq_len, state_shapes=states)
    model = ScriptedModel(rule, shape)
    known = EngineOptions(**options)  # type: ignore[arg-type]
    return Engine(model, tokenizer, known, drafter=drafter, clock=clock)


def ask(
    prompt: str | Sequence[int] = "Q:",
    *,
    max_tokens: int | None = 50,
    stop_strings: tuple[str, ...] = (),
    sampler: SamplerParams = GREEDY,
    min_tokens: int = 0,
    stop_ids: frozenset[int] = frozenset({EOS_ID}),
    **rest: Any,
) -> Request:
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
    return Request(
        ids,
        max_tokens=max_tokens,
        sampler=sampler,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        min_tokens=min_tokens,
        **rest,
    )


def without_progress(events: Sequence[Event]) -> list[Event]:
    """The events without those that only report progress."""
    return [event for event in events if not isinstance(event, StartEvent | PrefillEvent)]


def run_all(engine: Engine, limit: int = 5000) -> list[Event]:
    """Step until the engine is idle; events of all requests without progress."""
    events: list[Event] = []
    for _ in range(limit):
        if engine.is_idle:
            return without_progress(events)
        events += engine.step()
    raise AssertionError("the engine does not become idle")


def submit(engine: Engine, request: Request) -> None:
    """Queue a request after its constraints are compiled."""
    engine.submit(request, engine.compile(request))


def run_one(engine: Engine, request: Request) -> tuple[list[str], FinishEvent]:
    submit(engine, request)
    return texts_and_end(engine, run_all(engine))


def texts_and_end(engine: Engine, events: list[Event]) -> tuple[list[str], FinishEvent]:
    """Texts and end of one request, after checks that hold for every reply."""
    end = events.pop()
    assert isinstance(end, FinishEvent)
    texts = []
    reported: list[int] = []
    for event in events:
        if isinstance(event, RewindEvent):
            assert event.token_ids
            continue
        assert isinstance(event, TextEvent)
        assert event.text
        texts.append(event.text)
        reported += event.token_ids
    assert "".join(texts) == end.text, "the joined texts are the text of the end"
    assert tuple(reported) == end.token_ids[: len(reported)]
    assert engine.pool.num_available == engine.pool.num_pages, "every page is released"
    return texts, end


def run_to_failure(engine: Engine, request: Request) -> BaseException:
    """Error of a request that fails; the engine is idle afterwards."""
    submit(engine, request)
    events = run_all(engine)
    ends = [event for event in events if isinstance(event, FailEvent | FinishEvent)]
    assert len(ends) == 1, "every request has one end"
    assert isinstance(ends[0], FailEvent)
    assert engine.pool.num_available == engine.pool.num_pages, "every page is released"
    return ends[0].error
