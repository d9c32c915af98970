"""Async scheduling: launches the next forward pass before the host has read the sampled tokens.

Between two passes the host reads tokens, decodes text, looks for stops and plans the next batch. A
GPU need not wait for this if the next pass depends on nothing but the sampled tokens: they stay on
the device, and the next pass is launched right behind the sampling kernels. Once the host has read
the tokens, the launched pass, or a part of its rows, becomes the next pass of the plan. The row of
a sequence that has ended, rewound or left meanwhile is not used: it wrote its keys and values
behind the positions that count as cached.

The recurrent state of a hybrid has been changed in place by such a row, which is that of the
sampled token. A sequence that has ended leaves a snapshot after that token, one that goes back
restores an earlier snapshot. No state is copied for async scheduling (`cache/sequence_state.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from exl_core.engine.logits import PassLogits
from exl_core.engine.plan import BatchPlan
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import RequestSequence
from exl_core.errors import OutOfMemoryError
from exl_core.model.runner import NextPart, Runner
from exl_core.model.segment import Segment
from exl_core.ops.open import device_failures
from exl_core.ops.sampling import NextStep, PartLogits


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched pass: its logits, those of its parts, and the row of each sequence."""

    logits: Tensor
    parts: Sequence[PartLogits]
    rows: dict[RequestSequence, int]
    segments: list[Segment]

    def is_valid_for(self, sequence: RequestSequence) -> bool:
        """The sequence has grown by exactly the sampled token and has kept its pages."""
        segment = self.segments[self.rows[sequence]]
        last = len(segment.page_ids) - 1
        return (
            len(sequence.token_ids) == segment.past_len + 1
            and sequence.past_len == segment.past_len
            and sequence.page_ids[last:] == [segment.page_ids[last]]
        )


class AsyncStep:
    """Launches and hands over the next pass, for an engine without drafts.

    With drafts, the number of accepted tokens would be unknown too, not only the tokens.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._launched: _Launched | None = None
        self._parts: list[PartLogits] = []  # of the pass that is being launched
        self._failure: BaseException | None = None

    def next_step(self, plan: BatchPlan, logits: PassLogits) -> NextStep | None:
        """Continuation for `OpTable.sample_rows`; one token of each sequence is sampled.

        None if the pass after `plan` cannot be laid out yet, or has no captured graph.
        """
        segments = self._scheduler.next_segments(plan) if self._runner.has_graphs else None
        if segments is None:
            return None
        try:
            next_pass = self._runner.next_pass(segments)
            if next_pass is None:
                return None
            with device_failures(self._runner.store.device, "keeping the logits of a pass"):
                logits.keep()
        except OutOfMemoryError:
            return None  # the next pass then starts after the host has read the tokens
        parts, is_lost = next_pass.parts, False
        self._parts = []

        def launch(part: NextPart) -> None:
            nonlocal is_lost
            if is_lost:
                return
            try:
                self._parts.append(self._runner.run_on(part))
            except OutOfMemoryError:
                is_lost = True
                self._scheduler.lose_states(plan)  # the pass may have run in some layers
                return  # as above
            except BaseException as error:
                self._failure = error
                raise
            if len(self._parts) == len(parts):
                rows = {sequence: row for row, sequence in enumerate(plan.sequences)}
                whole = next_pass.logits_of(self._parts)
                self._launched = _Launched(whole, self._parts, rows, segments)
                self._scheduler.launched(plan)

        return next_pass.step(launch)

    def plan(self) -> BatchPlan | None:
        """Plan of the rows of the launched pass that are still valid; None if there is none."""
        launched = self._launched
        if launched is None:
            return None
        rows = ((one, launched.segments[row]) for one, row in launched.rows.items())
        plan = self._scheduler.launched_plan(
            (one, segment) for one, segment in rows if launched.is_valid_for(one)
        )
        if not plan.segments:
            self._launched = None
            return None
        return plan

    def take(self, plan: BatchPlan) -> PassLogits | None:
        """Logits of the launched pass for the rows of `plan`, which is the result of `plan()`.

        None if no pass was launched.
        """
        launched = self._launched
        self._launched, self._parts = None, []
        if launched is None:
            return None
        rows = [launched.rows[one] for one in plan.sequences]
        is_whole = len(rows) == len(launched.rows)  # all of them, in the same order
        return PassLogits(launched.logits, None if is_whole else rows, launched.parts)

    def drop(self) -> None:
        """Discard the launched pass, if there is one. No sequence uses it."""
        self._launched = self._failure = None
        self._parts = []

    def distrust(self, plan: BatchPlan) -> None:
        """Discard the pass that was launched behind `plan`, if there is one: its tokens may be
        other ones than those that are sampled next. Its changes to states are undone."""
        if self._parts:
            self._scheduler.lose_states(plan)
        self.drop()

    def has_failed_with(self, error: BaseException) -> bool:
        """`error` was raised while the pass was launched, not by sampling."""
        return self._failure is error
