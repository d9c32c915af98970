"""One reply at a time, step by step: begin a stream, then take one result a step until its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Event as Flag
from typing import Unpack

from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import (
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    RewindEvent,
    SampledToken,
    TextEvent,
)
from exl_core.engine.sequence import SequenceState
from exl_core.errors import RequestError
from exl_core.generate.generator import Generator, Prompt
from exl_core.generate.settings import RequestFields, Stops, check_names, split_stops
from exl_core.load import LoadedModel
from exl_core.model.embedded import EmbeddedSpan
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.stats import DraftStats


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What one step brought.

    chunk       new text; empty while it could still become a stop string, or half a character
    token_ids   tokens that are certain since the result before; a stop token is none of them
    is_end      nothing follows; `reason` and `finish` say why, and what the reply came to (with the
                tokens that gave no text, such as a stop token)
    tokens      the same tokens with what `Request.report` asked to be told of them
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
        """Both in one."""
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
    """The stream that runs, or the last one."""

    sequence: SequenceState
    abort: Flag | None
    waiting: deque[StreamResult] = field(default_factory=deque)
    """Of passes that are done."""
    has_ended: bool = False
    """In the engine; the end may be among those that wait."""
    error: BaseException | None = None
    """To be raised when all that came before it is handed out."""

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def is_over(self) -> bool:
        return self.has_ended and not self.waiting and self.error is None


class StreamingGenerator(Generator):
    """The two-phase protocol. What the last stream cached is reused by the next."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions | None = None,
        *,
        drafter: Drafter | None = None,
        several_tokens: bool = False,
    ) -> None:
        """`several_tokens`: with drafts a step gives all tokens of a pass, else one at a time."""
        super().__init__(loaded, options, drafter=drafter)
        self.draft_stats = DraftStats()
        """Of all streams that ended since it was last set."""
        self._stop: Stops = tuple(self.eos_ids)
        self._several_tokens = several_tokens
        self._stream: _Stream | None = None

    @property
    def stop(self) -> Stops:
        """What ends streams that do not say it themselves: the model's EOS, until it is set."""
        return self._stop

    @stop.setter
    def stop(self, stop: Stops) -> None:
        ids, strings = split_stops(stop)
        self._stop = (*ids, *strings)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The prompt and the reply so far, of the stream that runs or ran last.

        With drafts it may be ahead of the results that were handed out.
        """
        if self._stream is None:
            return ()
        sequence = self._stream.sequence
        prompt_ids = sequence.request.prompt_ids  # whose last token may be taken back, to be healed
        is_begun = len(sequence.token_ids) >= len(prompt_ids)
        return tuple(sequence.token_ids) if is_begun else prompt_ids

    def full(self) -> bool:
        """The context has no room for another token."""
        return len(self.sequence_ids) >= self.loaded.config.max_seq_len

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
        """A new stream; one that still runs is dropped, but not for a request that is refused.

        The work begins with the first step. `stop` None: as the attribute says; () is nothing.
        Once `abort` is set, be it amid a long prompt, the next result is the end.
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
        if self._stream is not None and not self._stream.has_ended:
            self.engine.check(request)
        self.cancel()
        self._stream = _Stream(self.engine.submit(request), abort)

    def step(self, ban_tokens: int | Iterable[int] = ()) -> StreamResult:
        """The next result; `ban_tokens` are not sampled in this step.

        Raises what made the stream fail, and RequestError where no stream runs.
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
            self._turn(stream)
        if stream.waiting:
            return stream.waiting.popleft()
        error, stream.error = stream.error, None
        assert error is not None, "a turn brings a result or an error"
        raise error

    def cancel(self) -> None:
        """Drop the stream, if one runs, with all of it that was not handed out."""
        stream = self._stream
        if stream is None:
            return
        if not stream.has_ended and self.engine.cancel(stream.request_id):
            self._read(stream, self.engine.step())
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
        """Nothing more comes of it."""
        stream.has_ended = True
        stream.error = None
        stream.waiting.clear()
        self.engine.cancel(stream.request_id)
        self.engine.discard_events(stream.request_id)

    def _turn(self, stream: _Stream) -> None:
        """Steps of the engine until a token was sampled; the prompt may take several.

        One result for each token, also for those whose text is held back; what the end brings
        comes with the last.
        """
        token_ids = stream.sequence.token_ids
        before = len(token_ids)
        results: list[StreamResult] = []
        while not results and len(token_ids) == before and stream.error is None:
            if stream.abort is not None and stream.abort.is_set():
                self.engine.cancel(stream.request_id)
            try:
                results = self._read(stream, self.engine.step())
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
            if event.request_id != stream.request_id:
                continue
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
