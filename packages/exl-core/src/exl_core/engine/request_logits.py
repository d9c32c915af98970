"""What one pass computed for each request, and the tokens that come of it.

The first tokens of all requests whose settings say everything are drawn at once; whatever depends
on another token of the same pass, or on more than settings, is drawn by its request's own sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from exl_core.engine.async_step import AsyncStep
from exl_core.engine.events import Event
from exl_core.engine.log_probs import score_prompt
from exl_core.engine.logits import LogitRow, PassLogits
from exl_core.engine.plan import BatchPlan
from exl_core.engine.reply import ReplyState
from exl_core.errors import DeviceError
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.table import NextStep, OpTable, RowSettings, Sampled
from exl_core.speculate.drafter import Draft


class Taken(NamedTuple):
    """What one request took from a pass: `emitted` tokens, the first `accepted` as drafted."""

    drafted: int
    accepted: int
    emitted: int


@dataclass(slots=True)
class RequestLogits:
    """One request's part of a pass. Its failures end in `reply.error`: the others go on."""

    reply: ReplyState
    rows: list[LogitRow]  # of the next token, and after each proposal
    negative: LogitRow | None  # of the negative prompt
    proposals: tuple[int, ...]
    drawn_from: tuple[Tensor, ...] | None  # the proposals, None: they are certain
    sampled: Sampled | None = None  # the next token

    def take(self, events: list[Event], clock: Callable[[], float]) -> Taken:
        """One token, and one for each proposal that holds."""
        emitted = accepted = 0
        # The others' logits may be fine, so they go on; what this one cached is not reused.
        with self.reply.guard:
            for i, row in enumerate(self.rows if self.reply.error is None else ()):
                events += self._take_one(i, row, clock())
                emitted += 1
                sequence = self.reply.sequence
                if sequence.negative is not None:
                    sequence.negative.token_ids.append(sequence.token_ids[-1])
                is_accepted = i < len(self.proposals) and (
                    sequence.token_ids[-1] == self.proposals[i]
                )
                accepted += is_accepted
                has_turned = self.reply.end is not None or self.reply.rewind_to is not None
                if not is_accepted or has_turned:
                    break
        return Taken(len(self.proposals), accepted, emitted)

    def _take_one(self, i: int, row: LogitRow, now: float) -> list[Event]:
        proposal = None
        if self.drawn_from is not None and i < len(self.proposals):
            proposal = (self.proposals[i], self.drawn_from[i])
        return self.reply.take(
            row,
            now,
            negative=self.negative,
            proposal=proposal,
            sampled=self.sampled if i == 0 else None,
        )


def split_by_request(
    plan: BatchPlan,
    replies: list[ReplyState],
    logits: PassLogits,
    drafts: dict[str, Draft],
    events: list[Event],
) -> list[RequestLogits]:
    """Of those whose next token the pass gives; `replies` go with the plan's segments. What prompts
    were scored is added to `events`."""
    parts = []
    row = 0
    for sequence, segment, reply in zip(plan.sequences, plan.segments, replies, strict=True):
        rows = [LogitRow(logits, i) for i in range(row, row + _num_rows(segment))]
        row += len(rows)
        if not rows or sequence is not reply.sequence:
            continue
        is_scored = sequence.is_scored
        if is_scored:
            with reply.guard:
                events += score_prompt(sequence, segment, logits.block(row - len(rows), row))
            if segment.past_len + len(segment.token_ids) < len(sequence.token_ids):
                continue
            rows = rows[-1:]
        draft = drafts.get(sequence.request_id)
        parts.append(
            RequestLogits(
                reply,
                rows,
                # The negative sequence's row comes next.
                negative=None if sequence.negative is None else LogitRow(logits, row),
                proposals=()
                if is_scored or segment.logit_rows is not LogitRows.ALL
                else segment.token_ids[1:],
                drawn_from=None if draft is None else draft.probabilities,
            )
        )
    return parts


def sample_batch(
    parts: list[RequestLogits],
    plan: BatchPlan,
    logits: PassLogits,
    ops: OpTable,
    *,
    vocab_size: int,
    async_step: AsyncStep | None,
) -> None:
    """The next token of all whose settings say everything, by one call; where that is all there
    are, `async_step` begins the pass that they lead to."""
    begun: list[tuple[RequestLogits, RowSettings]] = []
    for part in parts:
        if part.reply.error is not None or part.negative is not None:
            continue
        if part.drawn_from is not None and part.proposals:
            continue
        settings: RowSettings | None = None
        with part.reply.guard:
            settings = part.reply.begin(part.rows[0].number)
        if settings is not None:
            begun.append((part, settings))
    next_step: NextStep | None = None
    if async_step is not None and len(begun) == len(parts):
        next_step = async_step.next_step(plan, logits)
    try:
        sampled = logits.sample(ops, [settings for _, settings in begun], vocab_size, next_step)
    except Exception as error:
        if isinstance(error, DeviceError) or (
            async_step is not None and async_step.has_failed_with(error)
        ):
            raise  # no single request is at fault
        if async_step is not None:
            async_step.drop()
        _sample_each(begun, logits, ops, vocab_size)
        return
    for (part, _), one in zip(begun, sampled, strict=True):
        part.sampled = one


def _sample_each(
    begun: list[tuple[RequestLogits, RowSettings]],
    logits: PassLogits,
    ops: OpTable,
    vocab_size: int,
) -> None:
    """After a call for all that failed: those at fault fail by themselves, the others get their
    tokens. The settings hold the random numbers, so that nothing is drawn twice."""
    for part, settings in begun:
        with part.reply.guard:
            (part.sampled,) = logits.sample(ops, [settings], vocab_size)


def _num_rows(segment: Segment) -> int:
    if segment.logit_rows is LogitRows.NONE:
        return 0
    return len(segment.token_ids) if segment.logit_rows is LogitRows.ALL else 1
