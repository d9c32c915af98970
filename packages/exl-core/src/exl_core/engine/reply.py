"""What comes out of one request: its sampler, its constraints, its text, where it stops, its clock.

Takes logits, gives events. Knows neither pages nor batches. A token goes through these checks in
order: stop token, end of the constraints, banned string, stop string, length.
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
from exl_core.engine.sequence import SequenceState
from exl_core.engine.stop import StopMatch, StopMatcher
from exl_core.errors import ExlError, RequestError
from exl_core.ops.table import RowSettings, Sampled
from exl_core.sampling.sampler import LogitsError, Sample, Sampler, guide

Proposal = tuple[int, Tensor]
"""A proposed token, and the distribution that it was drawn from."""


class _Allowed(NamedTuple):
    """What may come next."""

    banned: frozenset[int]
    mask: Tensor | None


class TextDecoder(Protocol):
    """Text from ids, one at a time."""

    def feed(self, token_id: int, /) -> str: ...
    def feed_bytes(self, piece: bytes, /) -> str: ...
    def copy(self) -> TextDecoder: ...
    def flush(self) -> str: ...


class ReplyState:
    """Of one sequence, from its submission to its end.

    After each `take`, `end` is the reply's end if it has ended, and `rewind_to`, if it is not None,
    to how many tokens the sequence must go back before it goes on.
    """

    def __init__(
        self,
        sequence: SequenceState,
        sampler: Sampler,
        decoder: TextDecoder,
        vocab_size: int,
        now: float,
        *,
        filters: FilterSet | None = None,
        healing: Healing | None = None,
    ):
        """`vocab_size`: ids from there on are not drawn. `decoder` has read the whole prompt."""
        self.sequence = sequence
        self.filters = filters
        self.end: FinishEvent | None = None
        self.guard = FailureGuard()
        """Every call below is made under it (`Engine`)."""
        self.rewind_to: int | None = None
        self._request = sequence.request
        self._vocab_size = vocab_size
        self._banned_at_first = frozenset(
            token_id for token_id in self._request.stop_ids if token_id < vocab_size
        )
        self._sampler = sampler
        self._decoder = decoder
        self._healing = healing
        self._banned = (
            BannedStrings[TextDecoder](self._request.banned_strings)
            if self._request.banned_strings
            else None
        )
        self._healed_id: int | None = None
        self._tried: dict[int, set[int]] = {}  # by place: tokens that began a banned string
        self._banned_next: frozenset[int] = frozenset()
        self._matcher = StopMatcher(self._request.stop_strings)
        self._text: list[str] = []
        self._unreported: list[SampledToken] = []
        self._progress = 0  # tokens of the prompt that were reported as cached
        self._submitted_at = now
        self._started_at: float | None = None
        self._first_token_at: float | None = None

    @property
    def error(self) -> BaseException | None:
        """What went wrong in the work of this request, which ends with it."""
        return self.guard.error

    @property
    def num_generated(self) -> int:
        """-1 before the last token of the prompt is healed."""
        return len(self.sequence.token_ids) - len(self._request.prompt_ids)

    def start(self, now: float) -> list[Event]:
        """A pass begins that it is part of; later calls change nothing."""
        if self._started_at is not None:
            return []
        self._started_at = now
        sequence = self.sequence
        cached = (sequence.cached_tokens or 0, sequence.cached_pages or 0)
        return [StartEvent(sequence.request_id, *cached, now - self._submitted_at)]

    def progress(self) -> list[Event]:
        """A pass is booked that it was part of."""
        members = self.sequence.members
        done = sum(member.past_len for member in members)
        if self._first_token_at is not None or done <= self._progress:
            return []
        self._progress = done
        total = sum(len(member.token_ids) for member in members)
        return [PrefillEvent(self.sequence.request_id, done, total)]

    def ban_next(self, token_ids: frozenset[int]) -> None:
        self._banned_next = token_ids

    def start_mask(self) -> None:
        """Work on the constraints may begin, beside the forward pass."""
        if self.filters is not None and self._healing is None:
            self.filters.start()

    def begin(self, row: int) -> RowSettings | None:
        """What draws the next token from that row of the pass; `take` is told what it drew.

        None: `take` draws by itself.
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
        """The next token, from `logits` [vocab_size], is appended, and what comes of it.

        `negative`: the logits of the negative prompt, where there is one. `proposal`: what another
        distribution made; one that was certain is no business of the sampler's. `sampled`: what the
        settings of `begin` drew.
        """
        if self._first_token_at is None:
            self._first_token_at = now
        token = self._draw(logits, negative, proposal, sampled)
        token_id, place = token.token_id, len(self.sequence.token_ids)
        self.sequence.token_ids.append(token_id)
        if self._healing is not None:
            piece, self._healing = self._healing.grown_by(token_id), None
            self._healed_id = token_id
            return self._read(self._decoder.feed_bytes(piece), now)
        if token_id in self._request.stop_ids:
            return self._finish(FinishReason.STOP, token_id, now, token)
        self._unreported.append(token)
        if self.filters is not None:
            self.filters.accept(token_id)
        if self._banned is None:
            return self._read(self._decoder.feed(token_id), now)
        before = self._decoder.copy()
        found = self._banned.feed(place, self._decoder.feed(token_id), before)
        if isinstance(found, Rewind):
            return [self._go_back(found)]
        return self._read(found, now)

    def cancel(self, now: float) -> FinishEvent:
        """End it as it stands: text that is held back stays so."""
        held = self._matcher.held + ("" if self._banned is None else self._banned.held)
        return self._end(FinishReason.CANCELLED, None, now, held)

    def finish_empty(self, now: float) -> FinishEvent:
        """The end of a request for no tokens."""
        return self._end(FinishReason.LENGTH, None, now)

    def _draw(
        self,
        logits: LogitRow,
        negative: LogitRow | None,
        proposal: Proposal | None,
        sampled: Sampled | None,
    ) -> SampledToken:
        try:
            if sampled is None:
                sample = self._sample(logits, negative, proposal)
            else:
                wanted = self._request.report.probabilities
                sample = self._sampler.finish(
                    sampled, lambda: self._own(logits), want_probability=wanted
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
            self._own(logits).clone() if report.logits else None,
        )
        if self._healing is None and self._request.hooks:
            token = self._hooked(token)
            if token.token_id != sample.token_id:
                sample = Sample(token.token_id, None, sample.top)
        if report.log_probs is not None:
            token = with_log_probs([token], logits.read()[None], report.log_probs)[0]
        self._sampler.accept(sample)
        return token

    def _own(self, logits: LogitRow) -> Tensor:
        return logits.read()[: self._vocab_size]

    def _guided(self, logits: LogitRow, negative: LogitRow | None) -> Tensor:
        scale = self._request.sampler.cfg_scale
        if negative is None or scale is None:
            return self._own(logits)
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
        """Asked for once for each token."""
        banned = self._banned_next.union(self._tried.get(len(self.sequence.token_ids), ()))
        self._banned_next = frozenset()
        may_stop = self.num_generated >= self._request.min_tokens
        if not may_stop:
            banned |= self._banned_at_first
        mask = None
        if self._healing is not None:
            mask = self._healing.mask
        elif self.filters is not None:
            mask = self.filters.mask(may_end=may_stop)
        return _Allowed(banned, mask)

    def _hooked(self, token: SampledToken) -> SampledToken:
        """What the hooks make of it."""
        for hook in self._request.hooks:
            try:
                other = hook(token)
            except ExlError:
                raise
            except Exception as error:  # a stranger's failure is this request's alone
                raise self._error("a hook failed", got=repr(error)[:200]) from error
            if other is None:
                continue
            is_id = isinstance(other, int) and not isinstance(other, bool)
            if not is_id or not 0 <= other < self._vocab_size:
                expected = f"an id below {self._vocab_size}, or None"
                raise self._error("a hook gave no token", expected=expected, got=repr(other)[:200])
            if other == token.token_id:
                continue
            token = replace(token, token_id=other, probability=None)
        if token.token_id in self._tried.get(len(self.sequence.token_ids), ()):
            # Or it would be taken back for ever.
            raise self._error(
                "a hook insists on a token that begins a banned string", got=token.token_id
            )
        return token

    def _error(self, what: str, *, expected: object = None, got: object = None) -> RequestError:
        where = f"{self._request.request_id}, token {self.num_generated} of the reply"
        return RequestError(what, where=where, expected=expected, got=got)

    def _read(self, text: str, now: float) -> list[Event]:
        """More of the text, up to a stop string, and whether it ends here."""
        match = self._matcher.feed(text)
        events = self._emit(match.text)
        if match.stopped_by is not None:
            self._end_at(match, now)
        elif self.filters is not None and self.filters.is_finished:
            events += self._finish(FinishReason.CONSTRAINT, None, now)
        elif len(self.sequence.token_ids) >= self.sequence.max_len:
            events += self._finish(FinishReason.LENGTH, None, now)
        elif self._request.max_time_s is not None and self._run_s(now) >= self._request.max_time_s:
            events += self._finish(FinishReason.TIME, None, now)
        return events

    def _run_s(self, now: float) -> float:
        return 0.0 if self._started_at is None else now - self._started_at

    def _go_back(self, rewind: Rewind[TextDecoder]) -> RewindEvent:
        token_ids = self.sequence.token_ids
        taken = tuple(token_ids[rewind.place :])
        self._tried = {place: ids for place, ids in self._tried.items() if place <= rewind.place}
        self._tried.setdefault(rewind.place, set()).add(taken[0])
        del self._unreported[len(self._unreported) - len(taken) :]
        self._decoder = rewind.state
        self._sampler.rewind(rewind.place)
        if self.filters is not None:
            self.filters.rewind(len(taken))
        self.rewind_to = rewind.place
        return RewindEvent(self._request.request_id, rewind.text, taken)

    def _finish(
        self,
        reason: FinishReason,
        stopped_by: int | None,
        now: float,
        stop: SampledToken | None = None,
    ) -> list[Event]:
        """Nothing follows: what was held back is text after all, or completes a stop string."""
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
        told = () if self._request.report.is_empty else tokens
        return [TextEvent(self._request.request_id, text, token_ids, told)]

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
            token_ids=tuple(self.sequence.token_ids[prompt_tokens:]),
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
