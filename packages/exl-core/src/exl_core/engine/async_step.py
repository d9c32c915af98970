"""A pass that begins before anybody has read the tokens that it begins with.

Between two passes the host reads tokens, turns them into text, looks for ends and lays out what
comes next. A GPU need not wait for that where nothing is open but the tokens themselves: they stay
on it, and the next pass is launched right behind the drawing. Once they have been read, that pass
is the next one, or some of its rows are. A row whose sequence has ended, gone back or left computes
for nothing; what it wrote lies behind all that is known to be cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exl_core.engine.logits import PassLogits
from exl_core.engine.plan import BatchPlan
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import SequenceState
from exl_core.errors import OutOfMemoryError
from exl_core.model.runner import Runner
from exl_core.model.segment import Segment
from exl_core.ops.table import NextStep, device_failures


@dataclass(frozen=True, slots=True)
class _Begun:
    """A pass that runs, and whose its rows are."""

    logits: Tensor
    rows: dict[SequenceState, int]
    segments: list[Segment]

    def goes_on(self, sequence: SequenceState) -> bool:
        """It has got the token that its row began with, and is where it was."""
        segment = self.segments[self.rows[sequence]]
        last = len(segment.page_ids) - 1
        return (
            len(sequence.token_ids) == segment.past_len + 1
            and sequence.past_len == segment.past_len
            and sequence.page_ids[last:] == [segment.page_ids[last]]
        )


class AsyncStep:
    """Of one engine without drafts: these leave more open than a token."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._begun: _Begun | None = None
        self._failure: BaseException | None = None

    def next_step(self, plan: BatchPlan, logits: PassLogits) -> NextStep | None:
        """What the tokens lead to that are drawn of this pass, one of each of its sequences."""
        segments = self._scheduler.next_segments(plan) if self._runner.has_graphs else None
        token_ids = None if segments is None else self._runner.next_ids(segments)
        if segments is None or token_ids is None:
            return None
        try:
            with device_failures(self._runner.store.device, "keeping the logits of a pass"):
                logits.keep()
        except OutOfMemoryError:
            return None  # then it begins when the tokens have been read, as it does without

        def begin() -> None:
            try:
                begun = self._runner.run_on(segments)
            except OutOfMemoryError:
                return  # likewise
            except BaseException as error:
                self._failure = error
                raise
            rows = {sequence: row for row, sequence in enumerate(plan.sequences)}
            self._begun = _Begun(begun, rows, segments)

        return NextStep(token_ids, begin)

    def plan(self) -> BatchPlan | None:
        """The pass that has begun, as far as it is wanted; None if nothing of it is."""
        if self._begun is None:
            return None
        only = {sequence for sequence in self._begun.rows if self._begun.goes_on(sequence)}
        plan = self._scheduler.plan(only=only)
        if not plan.segments:
            self._begun = None
            return None
        return plan

    def take(self, plan: BatchPlan) -> PassLogits | None:
        """The logits of the pass that has begun, if there is one: then the plan is `plan`'s."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        return PassLogits(begun.logits, [begun.rows[sequence] for sequence in plan.sequences])

    def drop(self) -> None:
        """Whatever has begun, nobody wants it."""
        self._begun = self._failure = None

    def has_failed_with(self, error: BaseException) -> bool:
        """Launching the pass raised this: it is the pass's failure, not one of sampling."""
        return self._failure is error
