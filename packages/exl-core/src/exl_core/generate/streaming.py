"""Streaming generator: one reply at a time; `begin` a stream, then one result per `step`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Event as Flag
from typing import Unpack

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import (
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    RewindEvent,
    SampledToken,
    TextEvent,
)
from exl_core.engine.request import Request
from exl_core.engine.sequence import RequestSequence
from exl_core.errors import RequestError
from exl_core.generate.generator import Generator, Prompt
from exl_core.model.embedded import EmbeddedSpan
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_core.session.request_fields import RequestFields, Stops, check_names, split_stops
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.stats import DraftStats


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Result of one step.

    chunk       new text; empty while it may still become a stop string, or is part of a character
    token_ids   tokens that became final since the previous result, without a stop token
    is_end      no result follows; `reason` and `finish` have the outcome (including tokens without
                text, such as a stop token)
    tokens      the same tokens with the details that `Request.report` selects
    suppressed  text of a banned string that was taken back
    """

    chunk: str = ""
    token_ids: tuple[int, ...] = ()
    is_end: bool = False
    reason: FinishReason | None = None
    tokens: tuple[SampledToken, ...] = ()
    suppressed: str = ""
    finish: FinishEvent | None = None

    def followed_by(self, other: StreamResult) -> StreamResult:
        """This result and the next one, merged."""
        return StreamResult(
            chunk=self.chunk + other.chunk,
            token_ids=self.token_ids + other.token_ids,
            is_end=other.is_end,
            reason=other.reason,
            tokens=self.tokens + other.tokens,
            suppressed=self.suppressed + other.suppressed,
            finish=other.finish,
        )


@dataclass
class _Stream:
    """State of the running stream, or of the last one."""

    sequence: RequestSequence
    abort: Flag | None
    waiting: deque[StreamResult] = field(default_factory=deque)
    """Results of completed passes that were not returned yet."""
    has_ended: bool = False
    """The request has ended in the engine; its last result may still be in `waiting`."""
    error: BaseException | None = None
    """Error to raise after all earlier results have been returned."""

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def is_over(self) -> bool:
        return self.has_ended and not self.waiting and self.error is None


class StreamingGenerator(Generator):
    """Two-phase protocol, `begin` and `step`. A stream reuses what earlier streams cached."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions | None = None,
        *,
        drafter: Drafter | None = None,
        several_tokens: bool = False,
        engine: Engine | None = None,
    ) -> None:
        """`several_tokens`: with drafts, one step returns all tokens of a pass instead of one.

        `engine`: an existing engine of this model; `options` and `drafter` are then ignored.
        """
        super().__init__(loaded, options, drafter=drafter, engine=engine)
        self.draft_stats = DraftStats()
        """Sum over all streams that ended since it was last set."""
        self._stop: Stops = tuple(self.eos_ids)
        self._several_tokens = several_tokens
        self._stream: _Stream | None = None

    @property
    def stop(self) -> Stops:
        """Default stop tokens and strings of streams; initially the model's EOS tokens."""
        return self._stop

    @stop.setter
    def stop(self, stop: Stops) -> None:
        ids, strings = split_stops(stop)
        self._stop = (*ids, *strings)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """Prompt and reply so far of the running stream, or of the last one.

        With drafts it may be ahead of the results that were returned.
        """
        if self._stream is None:
            return ()
        sequence = self._stream.sequence
        prompt_ids = sequence.request.prompt_ids  # token healing removes the last one at first
        is_begun = len(sequence.token_ids) >= len(prompt_ids)
        return tuple(sequence.token_ids) if is_begun else prompt_ids

    def full(self) -> bool:
        """Whether the context or the cache has no room for another token."""
        return len(self.sequence_ids) >= self._max_len

    def begin(
        self,
        prompt: Prompt,
        *,
        negative: Prompt | None = None,
        stop: Stops = None,
        add_bos: bool | None = False,
        parse_special: bool = False,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
        abort: Flag | None = None,
        **settings: Unpack[RequestFields],
    ) -> None:
        """Begin a new stream. A running stream is cancelled, unless the new request is refused.

        Computation starts with the first `step`. `stop` None uses the attribute `stop`; () means no
        stop condition. Once `abort` is set, even during a long prompt, the next result is the end.
        """
        check_names(settings, self.begin)
        request = self.request(
            prompt,
            negative=negative,
            stop=self.stop if stop is None else stop,
            add_bos=add_bos,
            parse_special=parse_special,
            embeddings=embeddings,
            **settings,
        )
        self.begin_request(request, abort)

    def begin_request(self, request: Request, abort: Flag | None = None) -> None:
        """`begin` with a request."""
        if self._stream is not None and not self._stream.has_ended:
            self.engine.check(request)
        filters = self.engine.compile(request)
        self.cancel()
        self._stream = _Stream(self.engine.submit(request, filters), abort)

    def step(self, ban_tokens: int | Iterable[int] = ()) -> StreamResult:
        """The next result; `ban_tokens` are not sampled in this step.

        Raises the error of a stream that failed, and RequestError if no stream runs.
        """
        stream = self._running()
        banned = frozenset((ban_tokens,) if isinstance(ban_tokens, int) else ban_tokens)
        if banned:
            if stream.waiting:
                raise RequestError(
                    "tokens of this step are there already, brought by a draft",
                    expected="allow_drafts=False for streams that ban tokens on the way",
                )
            if stream.request_id in self.engine.live_requests:
                self.engine.ban_next(stream.request_id, banned)
        if not stream.waiting and stream.error is None:
            self._advance(stream)
        if stream.waiting:
            return stream.waiting.popleft()
        error, stream.error = stream.error, None
        assert error is not None, "a result or an error was added"
        raise error

    def change(self, sampler: SamplerParams | None = None, stop: Stops = None) -> None:
        """Change settings of the running stream from its next token on; None keeps them.

        No effect on tokens that a draft has brought already, nor on a stream that has ended.
        """
        stream = self._stream
        if stream is None or stream.request_id not in self.engine.live_requests:
            return
        if sampler is not None:
            self.engine.set_sampler(stream.request_id, sampler)
        if stop is not None:
            self.engine.set_stops(stream.request_id, *split_stops(stop))

    def __iter__(self) -> Iterator[StreamResult]:
        """Results of the running stream up to its end. Leaving the loop does not cancel it."""
        while True:
            result = self.step()
            yield result
            if result.is_end:
                return

    def cancel(self) -> None:
        """Cancel the running stream, if any, and drop results that were not returned."""
        stream = self._stream
        if stream is None:
            return
        if not stream.has_ended and self.engine.cancel(stream.request_id):
            self._read(stream, self.engine.step({stream.request_id}))
        self._close(stream)

    def _running(self) -> _Stream:
        if self._stream is None or self._stream.is_over:
            raise RequestError(
                "no stream runs",
                got="none was begun" if self._stream is None else "the last one has ended",
                next_step="Call begin first.",
            )
        return self._stream

    def _close(self, stream: _Stream) -> None:
        """End the stream without further results."""
        stream.has_ended = True
        stream.error = None
        stream.waiting.clear()
        self.engine.cancel(stream.request_id)
        self.engine.discard_events(stream.request_id)

    def _advance(self, stream: _Stream) -> None:
        """Step the engine until a token is sampled; a prompt may take several steps.

        Adds one result per token, even if its text is held back. The result of the last token
        includes the end of the stream.
        """
        token_ids = stream.sequence.token_ids
        before = len(token_ids)
        results: list[StreamResult] = []
        while not results and len(token_ids) == before and stream.error is None:
            if stream.abort is not None and stream.abort.is_set():
                self.engine.cancel(stream.request_id)
            try:
                results = self._read(stream, self.engine.step({stream.request_id}))
            except BaseException:
                self._close(stream)
                raise
        if stream.error is not None and not results:
            return
        wanted = 1 if self._several_tokens else max(1, len(token_ids) - before)
        while len(results) > wanted:
            last = results.pop()
            results[-1] = results[-1].followed_by(last)
        stream.waiting += [StreamResult()] * (wanted - len(results)) + results

    def _read(self, stream: _Stream, events: Iterable[Event]) -> list[StreamResult]:
        results = []
        for event in events:
            match event:
                case TextEvent():
                    results.append(StreamResult(event.text, event.token_ids, tokens=event.tokens))
                case RewindEvent():
                    results.append(StreamResult(suppressed=event.text))
                case FinishEvent():
                    stream.has_ended = True
                    if event.drafting is not None:
                        self.draft_stats = self.draft_stats + event.drafting
                    results.append(StreamResult(is_end=True, reason=event.reason, finish=event))
                case FailEvent():
                    stream.has_ended = True
                    stream.error = event.error
        return results
