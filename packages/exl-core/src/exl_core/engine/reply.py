"""State of one reply: sampler, constraints, text, stop conditions and times.

A `ReplyState` takes logits and returns events. It knows neither pages nor batches. Each token
passes these checks, in order: stop token, end of the constraints, banned string, stop string,
length, time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from exl_core.constrain.filter_set import FilterSet
from exl_core.engine.banned import BannedStrings, Rewind
from exl_core.engine.events import (
    Event,
    FinishEvent,
    FinishReason,
    PrefillEvent,
    RewindEvent,
    SampledToken,
    StartEvent,
    TextEvent,
)
from exl_core.engine.failure import FailureGuard
from exl_core.engine.healing import Healing
from exl_core.engine.log_probs import with_log_probs
from exl_core.engine.logits import LogitRow
from exl_core.engine.request import HookedToken, Request
from exl_core.engine.sequence import RequestSequence
from exl_core.engine.stop import StopMatch, StopMatcher
from exl_core.errors import ExlError, RequestError
from exl_core.ops.sampling import RowSettings, Sampled
from exl_core.sampling.sampler import LogitsError, Sample, Sampler, guide

Proposal = tuple[int, Tensor]
"""A drafted token, and the distribution that it was drawn from."""


class _Allowed(NamedTuple):
    """Limits on the next token: excluded ids, and a packed mask of allowed ids."""

    banned: frozenset[int]
    mask: Tensor | None


class TextDecoder(Protocol):
    """Incremental decoder from token ids to text."""

    def feed(self, token_id: int, /) -> str: ...
    def feed_bytes(self, piece: bytes, /) -> str: ...
    def copy(self) -> TextDecoder: ...
    def flush(self) -> str: ...


class ReplyState:
    """Reply of one sequence, from its submission to its end.

    After each `take`, `end` is the final event if the reply has ended. `rewind_to` is None, or the
    number of tokens that the caller must cut the sequence to before the next pass. Both are set if
    a reply ends because of its time limit while it goes back.
    """

    def __init__(
        self,
        sequence: RequestSequence,
        sampler: Sampler,
        decoder: TextDecoder,
        vocab_size: int,
        now: float,
        *,
        filters: FilterSet | None = None,
        healing: Healing | None = None,
    ):
        """Only ids below `vocab_size` are sampled. `decoder` has read the whole prompt."""
        self.sequence = sequence
        self.filters = filters
        self.end: FinishEvent | None = None
        self.guard = FailureGuard()
        """The engine makes every call below under this guard."""
        self.rewind_to: int | None = None
        self.is_cancelled = False
        """A hook has cancelled the request; it ends after this step."""
        self._request = sequence.request
        self._vocab_size = vocab_size
        self._stop_ids = self._request.stop_ids
        """Those that the next token was sampled under. A hook may change the request's meanwhile.
        """
        self._sampler = sampler
        self._decoder = decoder
        self._healing = healing
        self._banned = (
            BannedStrings[TextDecoder](self._request.banned_strings)
            if self._request.banned_strings
            else None
        )
        self._healed_id: int | None = None
        self._tried: dict[int, set[int]] = {}  # tokens that began a banned string, by position
        self._banned_next: frozenset[int] = frozenset()
        self._matcher = StopMatcher(self._request.stop_strings)
        self._text: list[str] = []
        self._unreported: list[SampledToken] = []
        self._progress = 0  # prompt tokens reported as cached
        self._submitted_at = now
        self._started_at: float | None = None
        self._first_token_at: float | None = None

    @property
    def error(self) -> BaseException | None:
        """Exception that ends this request, if its work has failed."""
        return self.guard.error

    @property
    def num_generated(self) -> int:
        """Tokens of the reply so far; -1 before the last prompt token is healed."""
        return len(self.sequence.token_ids) - len(self._request.prompt_ids)

    def start(self, now: float) -> list[Event]:
        """Record the start of the request's first pass; later calls have no effect."""
        if self._started_at is not None:
            return []
        self._started_at = now
        sequence = self.sequence
        cached = (sequence.cached_tokens or 0, sequence.cached_pages or 0)
        return [StartEvent(sequence.request_id, *cached, now - self._submitted_at)]

    def progress(self) -> list[Event]:
        """Report how much of the prompt is cached, after a pass of this request."""
        members = self.sequence.members
        done = sum(member.past_len for member in members)
        if self._first_token_at is not None or done <= self._progress:
            return []
        self._progress = done
        total = sum(len(member.token_ids) for member in members)
        return [PrefillEvent(self.sequence.request_id, done, total)]

    def ban_next(self, token_ids: frozenset[int]) -> None:
        self._banned_next = token_ids

    @property
    def mirostat_cut(self) -> float | None:
        return self._sampler.mirostat_cut

    def change(self, request: Request) -> None:
        """Continue with the sampler settings and stop conditions of `request`."""
        if request.sampler != self._request.sampler:
            self._sampler = self._sampler.changed(request.sampler)
        if request.stop_strings != self._request.stop_strings:
            self._matcher = self._matcher.changed(request.stop_strings)
        self._request = request
        for member in self.sequence.members:
            member.request = request

    def start_mask(self) -> None:
        """Start computing the constraints' mask in the background, during the forward pass."""
        if self.filters is not None and self._healing is None:
            self.filters.start()

    def begin(self, row: int) -> RowSettings | None:
        """Settings for batched sampling of the next token from this row of the pass.

        The caller passes the result of sampling to `take`. None if the token needs more than
        settings; then `take` samples it.
        """
        if not self._sampler.can_begin:
            return None
        allowed = self._next_allowed()
        return self._sampler.begin(
            row,
            self._vocab_size,
            self.sequence.token_ids,
            banned=allowed.banned,
            mask=allowed.mask,
            num_top=self._request.report.top_tokens,
        )

    def take(
        self,
        logits: LogitRow,
        now: float,
        *,
        negative: LogitRow | None = None,
        proposal: Proposal | None = None,
        sampled: Sampled | None = None,
    ) -> list[Event]:
        """Append the next token, sampled from `logits`, and return the resulting events.

        negative  logits of the negative prompt, under guidance
        proposal  drafted token to verify; None also for a deterministic draft, which the caller
                  compares with the sampled token
        sampled   result of batched sampling with the settings from `begin`
        """
        if self._first_token_at is None:
            self._first_token_at = now
        token, feeds_filters = self._next_token(logits, negative, proposal, sampled)
        token_id, position = token.token_id, len(self.sequence.token_ids)
        self.sequence.token_ids.append(token_id)
        if self._healing is not None:
            piece, self._healing = self._healing.grown_by(token_id), None
            self._healed_id = token_id
            if self.filters is not None:
                self.filters.accept_healed(token_id)
            return self._add_text(self._decoder.feed_bytes(piece), now)
        if token_id in self._stop_ids:
            return self._finish(FinishReason.STOP, token_id, now, token)
        self._unreported.append(token)
        if self.filters is not None:
            self.filters.accept(token_id, is_fed=feeds_filters)
        if self._banned is None:
            return self._add_text(self._decoder.feed(token_id), now)
        before = self._decoder.copy()
        found = self._banned.feed(position, self._decoder.feed(token_id), before)
        if isinstance(found, Rewind):
            events: list[Event] = [self._rewind(found)]
            if self._is_out_of_time(now):
                events += self._finish(FinishReason.TIME, None, now)
            return events
        return self._add_text(found, now)

    def cancel(self, now: float) -> FinishEvent:
        """End the reply as it is. Text that is held back is not emitted."""
        held = self._matcher.held + ("" if self._banned is None else self._banned.held)
        return self._end(FinishReason.CANCELLED, None, now, held)

    def finish_empty(self, now: float) -> FinishEvent:
        """End a request for zero tokens."""
        return self._end(FinishReason.LENGTH, None, now)

    def _next_token(
        self,
        logits: LogitRow,
        negative: LogitRow | None,
        proposal: Proposal | None,
        sampled: Sampled | None,
    ) -> tuple[SampledToken, bool]:
        """The token, and whether the filters see it."""
        try:
            if sampled is None:
                sample = self._sample(logits, negative, proposal)
            else:
                sample = self._sampler.finish(
                    sampled,
                    lambda: self._read(logits),
                    want_probability=self._request.report.probabilities,
                )
        except LogitsError as error:
            tried = self._tried.get(len(self.sequence.token_ids), ())
            if tried and math.isfinite(float(self._guided(logits, negative).amax())):
                raise self._error(
                    f"a banned string begins with each of the {len(tried)} tokens that may come"
                ) from error
            raise
        report = self._request.report
        token = SampledToken(
            sample.token_id,
            sample.probability,
            sample.top,
            self._read(logits).clone() if report.logits else None,
        )
        feeds_filters = True
        if self._healing is None and self._request.hooks:
            token, feeds_filters = self._call_hooks(token)
            if token.token_id != sample.token_id:
                sample = Sample(token.token_id, None, sample.top)
        if report.log_probs is not None:
            token = with_log_probs([token], logits.read()[None], report.log_probs)[0]
        self._sampler.accept(sample)
        return token, feeds_filters

    def _read(self, logits: LogitRow) -> Tensor:
        return logits.read()[: self._vocab_size]

    def _guided(self, logits: LogitRow, negative: LogitRow | None) -> Tensor:
        scale = self._request.sampler.cfg_scale
        if negative is None or scale is None:
            return self._read(logits)
        return guide(logits.read(), negative.read(), scale)[: self._vocab_size]

    def _sample(
        self, logits: LogitRow, negative: LogitRow | None, proposal: Proposal | None
    ) -> Sample:
        report, history = self._request.report, self.sequence.token_ids
        allowed = self._next_allowed()
        guided = self._guided(logits, negative)
        if proposal is None:
            return self._sampler.sample(
                guided,
                history,
                banned=allowed.banned,
                mask=allowed.mask,
                num_top=report.top_tokens,
                want_probability=report.probabilities,
            )
        return self._sampler.verify(
            guided,
            history,
            *proposal,
            banned=allowed.banned,
            mask=allowed.mask,
            num_top=report.top_tokens,
            want_probability=report.probabilities,
        )

    def _next_allowed(self) -> _Allowed:
        """Limits on the next token. Called once per token: ids of `ban_next` count only once."""
        banned, self._banned_next = self._banned_next, frozenset()
        if self._tried:
            banned = banned.union(self._tried.get(len(self.sequence.token_ids), ()))
        if self._stop_ids is not self._request.stop_ids:
            self._stop_ids = self._request.stop_ids
            if self.filters is not None:
                self.filters.set_eos(self._stop_ids)
        may_stop = self.num_generated >= self._request.min_tokens
        if not may_stop:
            banned = banned.union(i for i in self._stop_ids if i < self._vocab_size)
        mask = None
        if self._healing is not None:
            mask = self._healing.mask
            if self.filters is not None:
                mask = self.filters.healed_mask(mask)
        elif self.filters is not None:
            mask = self.filters.mask(may_end=may_stop)
        return _Allowed(banned, mask)

    def _call_hooks(self, token: SampledToken) -> tuple[SampledToken, bool]:
        """The token after every hook has seen, and possibly replaced, it, and whether the filters
        see it."""
        feeds_filters = True
        for hook in self._request.hooks:
            try:
                other = hook(token)
            except ExlError:
                raise
            except Exception as error:  # hooks are the caller's code and may raise anything
                raise self._error("a hook failed", got=repr(error)[:200]) from error
            if other is None:
                continue
            if isinstance(other, HookedToken):
                feeds_filters, other = other.feeds_filters, other.token_id
            is_id = isinstance(other, int) and not isinstance(other, bool)
            if not is_id or not 0 <= other < self._vocab_size:
                expected = f"an id below {self._vocab_size}, or None"
                raise self._error("a hook gave no token", expected=expected, got=repr(other)[:200])
            if other == token.token_id:
                continue
            token = replace(token, token_id=other, probability=None)
        if token.token_id in self._tried.get(len(self.sequence.token_ids), ()):
            # Otherwise the reply would be rewound to this position for ever.
            raise self._error(
                "a hook insists on a token that begins a banned string", got=token.token_id
            )
        return token, feeds_filters

    def _error(self, what: str, *, expected: object = None, got: object = None) -> RequestError:
        where = f"{self._request.request_id}, token {self.num_generated} of the reply"
        return RequestError(what, where=where, expected=expected, got=got)

    def _add_text(self, text: str, now: float) -> list[Event]:
        """Append text up to a stop string, then check the remaining stop conditions."""
        match = self._matcher.feed(text)
        events = self._emit(match.text)
        if match.stopped_by is not None:
            self._end_at(match, now)
        elif self.filters is not None and self.filters.is_finished:
            events += self._finish(FinishReason.CONSTRAINT, None, now)
        elif len(self.sequence.token_ids) >= self.sequence.max_len:
            events += self._finish(FinishReason.LENGTH, None, now)
        elif self._is_out_of_time(now):
            events += self._finish(FinishReason.TIME, None, now)
        return events

    def _is_out_of_time(self, now: float) -> bool:
        limit, started = self._request.max_time_s, self._started_at
        return limit is not None and started is not None and now - started >= limit

    def end_if_late(self, now: float) -> list[Event]:
        """End a reply that has a token and whose time is over, between two steps."""
        if self._first_token_at is None or not self._is_out_of_time(now):
            return []
        return self._finish(FinishReason.TIME, None, now)

    def _rewind(self, rewind: Rewind[TextDecoder]) -> RewindEvent:
        """Take back all tokens from the one that began a banned string."""
        start = rewind.position
        removed = tuple(self.sequence.token_ids[start:])
        self._tried = {position: ids for position, ids in self._tried.items() if position <= start}
        self._tried.setdefault(start, set()).add(removed[0])
        del self._unreported[len(self._unreported) - len(removed) :]
        self._decoder = rewind.state
        self._sampler.rewind(start)
        if self.filters is not None:
            self.filters.rewind(len(removed))
        self.rewind_to = start
        return RewindEvent(self._request.request_id, rewind.text, removed)

    def _finish(
        self,
        reason: FinishReason,
        stopped_by: int | None,
        now: float,
        stop: SampledToken | None = None,
    ) -> list[Event]:
        """End the reply. Held-back text is emitted, unless it completes a stop string."""
        held = "" if self._banned is None else self._banned.flush()
        match = self._matcher.finish(held + self._decoder.flush())
        events = self._emit(match.text)
        if stop is not None:
            self._unreported.append(stop)
        if match.stopped_by is not None:
            self._end_at(match, now)
        else:
            self._end(reason, stopped_by, now)
        return events

    def _emit(self, text: str) -> list[Event]:
        if not text:
            return []
        self._text.append(text)
        count = len(self._unreported) - (0 if self._banned is None else self._banned.num_held)
        tokens = tuple(self._unreported[:count])
        del self._unreported[:count]
        token_ids = tuple(token.token_id for token in tokens)
        reported = () if self._request.report.is_empty else tokens
        return [TextEvent(self._request.request_id, text, token_ids, reported)]

    def _end_at(self, match: StopMatch, now: float) -> FinishEvent:
        return self._end(FinishReason.STOP, match.stopped_by, now, match.rest)

    def _end(
        self, reason: FinishReason, stopped_by: int | str | None, now: float, held: str = ""
    ) -> FinishEvent:
        started = now if self._started_at is None else self._started_at
        first = now if self._first_token_at is None else self._first_token_at
        prompt_tokens = len(self._request.prompt_ids)
        self.end = FinishEvent(
            request_id=self._request.request_id,
            reason=reason,
            stopped_by=stopped_by,
            text="".join(self._text),
            token_ids=tuple(self.sequence.token_ids[prompt_tokens : self.rewind_to]),
            prompt_tokens=prompt_tokens,
            cached_tokens=self.sequence.cached_tokens or 0,
            queued_s=started - self._submitted_at,
            prefill_s=first - started,
            decode_s=now - first,
            held_text=held,
            tokens=() if self._request.report.is_empty else tuple(self._unreported),
            cached_pages=self.sequence.cached_pages or 0,
            healed_id=self._healed_id,
        )
        return self.end
