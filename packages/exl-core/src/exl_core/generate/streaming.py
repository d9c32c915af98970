"""One reply at a time, step by step: begin a stream, then take one result a step until its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.generator import Generator, Prompt, RequestFields, Stop
from exl_core.load import LoadedModel
from exl_core.model.embedded import EmbeddedSpan
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.stats import DraftStats


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What one step brought.

    chunk       new text; empty while it could still become a stop string, or half a character
    token_ids   tokens that are certain since the result before; a stop token is none of them
    is_end      nothing follows; `reason` and `finish` say why, and what the reply came to
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


@dataclass
class _Stream:
    """The stream that runs, or the last one."""

    request: Request
    waiting: deque[Event] = field(default_factory=deque)
    finish: FinishEvent | None = None


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
        self.stop: Stop | Iterable[Stop] = tuple(self.eos_ids)
        """What ends streams that do not say it themselves: the model's EOS, until it is set."""
        self.draft_stats = DraftStats()
        """Of all streams that ended since it was last set."""
        self._several_tokens = several_tokens
        self._stream: _Stream | None = None

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The prompt and the reply so far, of the stream that runs or ran last."""
        if self._stream is None:
            return ()
        if self._stream.finish is not None:
            return self._stream.request.prompt_ids + self._stream.finish.token_ids
        return self.engine.token_ids_of(self._stream.request.request_id)

    def full(self) -> bool:
        """The context has no room for another token."""
        return len(self.sequence_ids) >= self.loaded.config.max_seq_len

    def begin(
        self,
        prompt: Prompt,
        *,
        negative: Prompt | None = None,
        stop: Stop | Iterable[Stop] | None = None,
        add_bos: bool | None = False,
        parse_special: bool = False,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
        **settings: Unpack[RequestFields],
    ) -> None:
        """A new stream; one that still runs is dropped. The work begins with the first step."""
        request = self.request(
            prompt,
            negative=negative,
            stop=self.stop if stop is None else stop,
            add_bos=add_bos,
            parse_special=parse_special,
            embeddings=embeddings,
            **settings,
        )
        self.cancel()
        self.engine.submit(request)
        self._stream = _Stream(request)

    def step(self, ban_tokens: Iterable[int] = ()) -> StreamResult:
        """The next result; `ban_tokens` are not sampled in this step.

        Raises what made the stream fail, and RequestError where no stream runs.
        """
        stream = self._running()
        banned = frozenset(ban_tokens)
        if banned:
            if stream.waiting:
                raise RequestError(
                    "tokens of this step are there already, brought by a draft",
                    expected="allow_drafts=False for streams that ban tokens on the way",
                )
            self.engine.ban_next(stream.request.request_id, banned)
        if not stream.waiting:
            self._turn(stream)
        if self._several_tokens:
            return self._joined(stream)
        return self._result(stream, stream.waiting.popleft()) if stream.waiting else StreamResult()

    def cancel(self) -> None:
        """Drop the stream, if one runs."""
        if self._stream is not None and self._stream.finish is None:
            request_id = self._stream.request.request_id
            self.engine.cancel(request_id)
            self.engine.discard_events(request_id)
        self._stream = None

    def _running(self) -> _Stream:
        if self._stream is None or self._stream.finish is not None:
            raise RequestError(
                "no stream runs",
                got="none was begun" if self._stream is None else "the last one has ended",
                next_step="Call begin first.",
            )
        return self._stream

    def _turn(self, stream: _Stream) -> None:
        """Steps of the engine until a token was sampled; the prompt may take several."""
        request_id = stream.request.request_id
        before = len(self.engine.token_ids_of(request_id))
        while not stream.waiting:
            events = self.engine.step()
            stream.waiting += [
                event
                for event in events
                if event.request_id == request_id
                and isinstance(event, TextEvent | RewindEvent | FinishEvent | FailEvent)
            ]
            is_live = request_id in self.engine.live_requests
            if is_live and len(self.engine.token_ids_of(request_id)) > before:
                return

    def _joined(self, stream: _Stream) -> StreamResult:
        results = [
            self._result(stream, stream.waiting.popleft()) for _ in range(len(stream.waiting))
        ]
        if not results:
            return StreamResult()
        last = results[-1]
        return StreamResult(
            chunk="".join(result.chunk for result in results),
            token_ids=tuple(i for result in results for i in result.token_ids),
            is_end=last.is_end,
            reason=last.reason,
            tokens=tuple(t for result in results for t in result.tokens),
            suppressed="".join(result.suppressed for result in results),
            finish=last.finish,
        )

    def _result(self, stream: _Stream, event: Event) -> StreamResult:
        match event:
            case TextEvent():
                return StreamResult(event.text, event.token_ids, tokens=event.tokens)
            case RewindEvent():
                return StreamResult(suppressed=event.text)
            case FinishEvent():
                stream.finish = event
                if event.drafting is not None:
                    self.draft_stats = self.draft_stats + event.drafting
                return StreamResult(
                    is_end=True, reason=event.reason, tokens=event.tokens, finish=event
                )
            case FailEvent():
                self._stream = None
                raise event.error
        raise AssertionError("other events were left out")
