"""The loop of the engine for callers that wait: submit requests, step until they end, clean up.

`streaming.py` and `dynamic.py` have no loop: their callers step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from exl_core.constrain.filter import Filter
from exl_core.engine.engine import Engine
from exl_core.engine.events import Event, FailEvent, FinishEvent, TextEvent
from exl_core.engine.request import Request
from exl_core.engine.sequence import RequestSequence
from exl_core.errors import RequestError

IsStopped = Callable[[], bool]


class Run:
    """Requests that were submitted together, until the last one has ended."""

    def __init__(self, engine: Engine) -> None:
        self.sequences: dict[str, RequestSequence] = {}
        """Prompt and reply of each request, by its id."""
        self._engine = engine
        self._live: set[str] = set()

    def submit(self, request: Request, filters: tuple[Filter, ...] | None = None) -> None:
        """Queue the request. `filters` are its compiled constraints; without them, compile here."""
        if filters is None:
            filters = self._engine.compile(request)
        self.sequences[request.request_id] = self._engine.submit(request, filters)
        self._live.add(request.request_id)

    @property
    def has_ended(self) -> bool:
        return not self._live

    def step(self) -> list[Event]:
        """Events of one step for the requests of this run.

        If a request failed, raises its error.
        """
        events = self._engine.step(self.sequences)
        for event in events:
            if isinstance(event, FailEvent):
                raise event.error
            if isinstance(event, FinishEvent):
                self._live.discard(event.request_id)
        return events

    def events(self, is_stopped: IsStopped | None = None) -> Iterator[Event]:
        """Step until all requests have ended, and yield their events.

        `is_stopped` is called before every step. Once it returns true, the requests are cancelled
        and end with the text that they have.
        """
        while not self.has_ended:
            if is_stopped is not None and is_stopped():
                for request_id in self._live:
                    self._engine.cancel(request_id)
            yield from self.step()

    def close(self) -> None:
        """Cancel the requests that still run, and drop their unread events."""
        for request_id in self.sequences:
            self._engine.cancel(request_id)  # has no effect on a request that has ended
            self._engine.discard_events(request_id)


@contextmanager
def running(engine: Engine, requests: Iterable[Request] = ()) -> Iterator[Run]:
    """Submit `requests` and yield their `Run`. Leaving the context cancels those that still run.

    Raises RequestError if the engine has live requests, which others step.
    """
    if engine.live_requests:
        raise RequestError(
            "the engine is busy",
            expected="no live requests",
            got=", ".join(sorted(engine.live_requests)),
            next_step="Let them end, or submit to the engine and step it yourself.",
        )
    run = Run(engine)
    try:
        for request in requests:
            run.submit(request)
        yield run
    finally:
        run.close()


def stream(engine: Engine, request: Request) -> Iterator[TextEvent | FinishEvent]:
    """Yield text as it becomes final; the last event is the `FinishEvent`.

    A bad request is refused at this call; generation starts when the first event is read. Closing
    the iterator, or an exception in the consumer, cancels the request. If the request fails, its
    error is raised.
    """
    engine.check(request)
    return _stream(engine, request, engine.compile(request))


def _stream(
    engine: Engine, request: Request, filters: tuple[Filter, ...]
) -> Iterator[TextEvent | FinishEvent]:
    with running(engine) as run:
        run.submit(request, filters)
        for event in run.events():
            if isinstance(event, TextEvent | FinishEvent):
                yield event


def generate(engine: Engine, request: Request) -> FinishEvent:
    """The whole reply."""
    for event in stream(engine, request):
        if isinstance(event, FinishEvent):
            return event
    raise AssertionError("a stream ends with a FinishEvent or raises")
