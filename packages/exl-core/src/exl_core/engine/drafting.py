"""Drafts for decoding requests: their lengths, acceptance and cost.

Connects the drafter with one controller per request. A request whose drafts do not pay gets shorter
drafts, or none for a while. Its reply is the same either way.

A drafter that raises costs its drafts, not the requests: the step goes on without drafts, and a
warning names the error. After `MAX_FAILURES` failures in a row, or if it cannot follow moved pages,
the drafter is not used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exl_core.engine.sequence import RequestSequence
from exl_core.errors import printable
from exl_core.speculate.controller import DraftController, PassCosts, SteadyDrafts
from exl_core.speculate.drafter import Draft, Drafter, DraftJob, StateDrafter
from exl_core.speculate.stats import DraftStats

MAX_FAILURES = 3
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    """Draft state of one live request."""

    controller: DraftController | SteadyDrafts
    stats: DraftStats = field(default_factory=DraftStats)
    draft_s: float = 0.0
    """Seconds of the latest proposal, divided evenly among the requests it was for."""


class Drafting:
    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        clock: Callable[[], float],
        *,
        is_adaptive: bool = True,
    ) -> None:
        """`vocab_size`: drafts are cut before the first id that is not below it. `is_adaptive`
        False: drafts keep the drafter's length, even if they do not pay."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._clock = clock
        self._is_adaptive = is_adaptive
        self._costs = PassCosts()
        self._records: dict[str, _Record] = {}
        self._failures = 0  # in a row
        self._is_off = False

    @property
    def reads_states(self) -> bool:
        """Whether the drafter reads states from the cache of the model."""
        return isinstance(self._drafter, StateDrafter)

    def propose(
        self, sequences: Sequence[RequestSequence], reserve: Callable[[RequestSequence, int], int]
    ) -> dict[str, Draft]:
        """Drafts by request id, without requests that have no room or no guess.

        `reserve(sequence, count)` allocates pages for a draft and returns how many tokens fit.
        """
        if self._is_off:
            return {}
        jobs = []
        rows = len(sequences)
        for sequence in sequences:
            record = self._record(sequence.request_id)
            # Verification appends one token beyond the accepted ones.
            limit = sequence.max_len - len(sequence.token_ids) - 1
            count = record.controller.length(limit, rows=rows, sequences=len(sequences))
            count = reserve(sequence, count) if count > 0 else 0
            if count > 0:
                rows += count
                jobs.append(
                    DraftJob(
                        request_id=sequence.request_id,
                        token_ids=sequence.token_ids,
                        page_ids=tuple(sequence.page_ids),
                        page_keys=sequence.state.keys,
                        max_tokens=count,
                        sampler=sequence.request.sampler,
                        key_root=sequence.state.key_root,
                    )
                )
        if not jobs:
            return {}
        started = self._clock()
        try:
            drafts = self._drafter.propose(jobs)
            cut = {
                job.request_id: self._cut(draft, job.max_tokens)
                for job, draft in zip(jobs, drafts, strict=True)
            }
        except Exception as error:  # noqa: BLE001 - any class: a drafter is the caller's code
            self._failed(error)
            return {}
        self._failures = 0
        each = (self._clock() - started) / len(jobs)
        for job in jobs:
            self._record(job.request_id).draft_s = each
        return {request_id: draft for request_id, draft in cut.items() if draft.token_ids}

    def passed(self, rows: int, seconds: float) -> None:
        """Record the duration of a forward pass. Called before `verified`."""
        self._costs.record(rows, seconds)

    def verified(
        self,
        request_id: str,
        *,
        drafted: int,
        accepted: int,
        emitted: int,
        rows: int,
        sequences: int,
    ) -> None:
        """Record the outcome of one request in a pass of `rows` rows.

        It got `emitted` tokens, the first `accepted` of which were drafted. That is all but the
        last; or all of them, if the reply stopped at a drafted token.
        """
        record = self._record(request_id)
        record.stats = record.stats.with_round(drafted=drafted, accepted=accepted, emitted=emitted)
        record.controller.record(
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            draft_s=record.draft_s,
            rows=rows,
            sequences=sequences,
        )
        record.draft_s = 0.0

    def stats(self, request_id: str) -> DraftStats:
        known = self._records.get(request_id)
        return DraftStats() if known is None else known.stats

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)
        if self._is_off:
            return
        try:
            self._drafter.forget(request_id)
        except Exception as error:  # noqa: BLE001 - as in `propose`
            self._failed(error)

    def moved(self, moves: Sequence[tuple[int, int]]) -> None:
        if self._is_off:
            return
        try:
            self._drafter.moved(moves)
        except Exception as error:  # noqa: BLE001 - as in `propose`
            self._failed(error, is_fatal=True)  # its record of pages is wrong from here on

    def _failed(self, error: Exception, *, is_fatal: bool = False) -> None:
        self._failures += 1
        self._is_off = is_fatal or self._failures >= MAX_FAILURES
        rest = "it is not used again" if self._is_off else "this step has no drafts"
        if self._is_off or self._failures == 1:
            kind = type(error).__name__
            text = printable(str(error))[:200]
            _LOG.warning("exl: warning: the drafter failed and %s (%s: %s)", rest, kind, text)

    def _cut(self, draft: Draft, max_tokens: int) -> Draft:
        """Cut the draft to its limit and before the first id that the model cannot sample."""
        token_ids = draft.token_ids[:max_tokens]
        unknown = (i for i, token_id in enumerate(token_ids) if token_id >= self._vocab_size)
        count = next(unknown, len(token_ids))
        return Draft(token_ids[:count], draft.probabilities)

    def _record(self, request_id: str) -> _Record:
        known = self._records.get(request_id)
        if known is None:
            longest = self._drafter.max_tokens
            known = _Record(
                DraftController(self._costs, longest)
                if self._is_adaptive
                else SteadyDrafts(longest)
            )
            self._records[request_id] = known
        return known
