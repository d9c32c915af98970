"""What comes out of one request: its sampler, its text, where it stops, and its clock.

Takes logits, gives events. Knows neither pages nor batches. A token goes through these checks in
order: stop token, stop string, length.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from exl_core.engine.events import FinishEvent, FinishReason, TextEvent
from exl_core.engine.sequence import Sequence
from exl_core.engine.stop import StopMatcher
from exl_core.sampling.sampler import Sampler


class TextDecoder(Protocol):
    """Text from ids, one at a time."""

    def feed(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


class Detokenizes(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def stream_decoder(self) -> TextDecoder: ...


class Output:
    """Of one sequence, from its submission to its end."""

    def __init__(self, sequence: Sequence, tokenizer: Detokenizes, vocab_size: int, now: float):
        self.sequence = sequence
        self._request = sequence.request
        # A model's vocabulary is often padded: ids that the tokenizer does not have are not drawn.
        self._vocab_size = min(vocab_size, tokenizer.vocab_size)
        self._banned_at_first = frozenset(
            token_id for token_id in self._request.stop_ids if token_id < self._vocab_size
        )
        self._sampler = Sampler(self._request.sampler)
        self._decoder = tokenizer.stream_decoder()
        # The reply continues the prompt: its first character may begin in it, and a space at the
        # start of the reply is not one at the start of a text.
        for token_id in self._request.prompt_ids:
            self._decoder.feed(token_id)
        self._matcher = StopMatcher(self._request.stop_strings)
        self._text: list[str] = []
        self._unreported: list[int] = []
        self._submitted_at = now
        self._started_at: float | None = None
        self._first_token_at: float | None = None

    def mark_started(self, now: float) -> None:
        """Its first pass begins; later calls change nothing."""
        if self._started_at is None:
            self._started_at = now

    def sample(self, logits: Tensor) -> int:
        """Draw the next token from `logits` [vocab_size] and append it to the sequence."""
        banned: frozenset[int] = frozenset()
        if len(self.sequence.token_ids) - len(self._request.prompt_ids) < self._request.min_tokens:
            banned = self._banned_at_first
        token_ids = self.sequence.token_ids
        token_id = self._sampler.sample(logits[: self._vocab_size], token_ids, banned)
        token_ids.append(token_id)
        self._unreported.append(token_id)
        return token_id

    def consume(self, token_id: int, now: float) -> list[TextEvent | FinishEvent]:
        """The events of the token just appended."""
        if self._first_token_at is None:
            self._first_token_at = now
        if token_id in self._request.stop_ids:
            return self._finish(FinishReason.STOP, token_id, now)
        match = self._matcher.feed(self._decoder.feed(token_id))
        events: list[TextEvent | FinishEvent] = self._emit(match.text)
        if match.stopped_by is not None:
            return [*events, self._end(FinishReason.STOP, match.stopped_by, now)]
        if len(self.sequence.token_ids) >= self.sequence.max_len:
            return [*events, *self._finish(FinishReason.LENGTH, None, now)]
        return events

    def cancel(self, now: float) -> FinishEvent:
        """End it as it stands: text that is held back stays so."""
        return self._end(FinishReason.CANCELLED, None, now)

    def finish_empty(self, now: float) -> FinishEvent:
        """The end of a request for no tokens."""
        return self._end(FinishReason.LENGTH, None, now)

    def _finish(
        self, reason: FinishReason, stopped_by: int | None, now: float
    ) -> list[TextEvent | FinishEvent]:
        """Nothing follows: what was held back is text after all, or completes a stop string."""
        match = self._matcher.finish(self._decoder.flush())
        events: list[TextEvent | FinishEvent] = self._emit(match.text)
        if match.stopped_by is not None:
            return [*events, self._end(FinishReason.STOP, match.stopped_by, now)]
        return [*events, self._end(reason, stopped_by, now)]

    def _emit(self, text: str) -> list[TextEvent | FinishEvent]:
        if not text:
            return []
        self._text.append(text)
        token_ids = tuple(self._unreported)
        self._unreported.clear()
        return [TextEvent(self._request.request_id, text, token_ids)]

    def _end(self, reason: FinishReason, stopped_by: int | str | None, now: float) -> FinishEvent:
        started = now if self._started_at is None else self._started_at
        first = now if self._first_token_at is None else self._first_token_at
        prompt_tokens = len(self._request.prompt_ids)
        return FinishEvent(
            request_id=self._request.request_id,
            reason=reason,
            stopped_by=stopped_by,
            text="".join(self._text),
            token_ids=tuple(self.sequence.token_ids[prompt_tokens:]),
            prompt_tokens=prompt_tokens,
            cached_tokens=self.sequence.cached_tokens or 0,
            queued_s=started - self._submitted_at,
            prefill_s=first - started,
            decode_s=now - first,
        )
