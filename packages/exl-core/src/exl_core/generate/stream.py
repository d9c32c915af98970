"""One request at a time: submit it and step the engine until it ends.

For several requests at once, call `Engine.submit` and `Engine.step` and sort the events by id.
"""

from __future__ import annotations

from collections.abc import Iterator

from exl_core.constrain.filter import Filter
from exl_core.engine.engine import Engine
from exl_core.engine.events import FailEvent, FinishEvent, TextEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError


def stream(engine: Engine, request: Request) -> Iterator[TextEvent | FinishEvent]:
    """Yield text as it becomes final; the last event is the `FinishEvent`.

    A bad request is refused at this call; generation starts when the first event is read. Closing
    the iterator, or an exception in the consumer, cancels the request. If the request fails, its
    error is raised.
    """
    engine.check(request)
    return _events(engine, request, engine.compile(request))


def generate(engine: Engine, request: Request) -> FinishEvent:
    """The whole reply."""
    for event in stream(engine, request):
        if isinstance(event, FinishEvent):
            return event
    raise AssertionError("a stream ends with a FinishEvent or raises")


def _events(
    engine: Engine, request: Request, filters: tuple[Filter, ...]
) -> Iterator[TextEvent | FinishEvent]:
    request_id = request.request_id
    if engine.live_requests:
        raise RequestError(
            "the engine is busy, and a stream would swallow the others' events",
            where=request_id,
            expected="no live requests",
            got=", ".join(sorted(engine.live_requests)),
            next_step="Submit to the engine and step it yourself.",
        )
    engine.submit(request, filters)
    try:
        while True:
            for event in engine.step():
                if event.request_id != request_id:
                    continue  # pending event of a request that ended earlier
                if isinstance(event, FailEvent):
                    raise event.error
                if isinstance(event, TextEvent | FinishEvent):
                    yield event
                if isinstance(event, FinishEvent):
                    return
    finally:
        engine.cancel(request_id)  # has no effect once it has ended
        engine.discard_events(request_id)
