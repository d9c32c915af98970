"""Logits of one forward pass, split by request, and the tokens sampled from them.

The next tokens of all requests whose sampling depends on settings alone are sampled by one call
(batched sampling). A request's own sampler handles everything else: tokens that depend on another
token of the same pass (verification of drafts), guidance, and steps that read logits or state.
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
from exl_core.ops.sampling import NextStep, RowSettings, Sampled
from exl_core.ops.table import OpTable
from exl_core.speculate.drafter import Draft


class TokenCounts(NamedTuple):
    """Tokens of one request in one pass: drafted, accepted, and appended to the reply."""

    drafted: int
    accepted: int
    emitted: int


@dataclass(slots=True)
class RequestLogits:
    """Logits of one request in one pass. Its failures are kept in `reply.error`."""

    reply: ReplyState
    rows: list[LogitRow]  # for the next token, then one after each proposal; none: no token wanted
    negative: LogitRow | None  # of the negative prompt
    proposals: tuple[int, ...]  # drafted tokens, in order
    drawn_from: tuple[Tensor, ...] | None  # distribution of each proposal; None: deterministic
    sampled: Sampled | None = None  # the next token, if batched sampling has sampled it

    def take(self, events: list[Event], clock: Callable[[], float]) -> TokenCounts:
        """Append the next token, and one more after each accepted proposal.

        Without rows, end the reply.
        """
        emitted = accepted = 0
        # Logits of other requests may be valid, so these continue. The cached values of a failed
        # request are not reused (`Engine._drop_failed`).
        with self.reply.guard:
            if not self.rows and self.reply.error is None:
                self.reply.finish_empty(clock())
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
                is_stopped = (
                    self.reply.end is not None
                    or self.reply.rewind_to is not None
                    or self.reply.is_cancelled
                )
                if not is_accepted or is_stopped:
                    break
        return TokenCounts(len(self.proposals), accepted, emitted)

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
    """One entry per request whose next token this pass predicts, or that ends without a token.

    `replies` has one item per segment of the plan. Scores of prompt tokens are appended to
    `events`.
    """
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
            if sequence.request.max_tokens == 0:
                if sequence.is_scored:
                    continue
                rows = []
            elif segment.past_len + len(segment.token_ids) < len(sequence.token_ids):
                continue
            rows = rows[-1:]
        draft = drafts.get(sequence.request_id)
        parts.append(
            RequestLogits(
                reply,
                rows,
                # The logits of the negative sequence follow (`BatchPlan`).
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
    """Sample the next token of every request that needs settings only, by one call.

    If this covers all requests of the pass, `async_step` launches the next pass with the tokens.
    """
    batch: list[tuple[RequestLogits, RowSettings]] = []
    for part in parts:
        if part.reply.error is not None or part.negative is not None or not part.rows:
            continue
        if part.drawn_from is not None and part.proposals:
            continue
        settings: RowSettings | None = None
        with part.reply.guard:
            settings = part.reply.begin(part.rows[0].number)
        if settings is not None:
            batch.append((part, settings))
    next_step: NextStep | None = None
    if async_step is not None and len(batch) == len(parts):
        next_step = async_step.next_step(plan, logits)
    try:
        sampled = logits.sample(ops, [settings for _, settings in batch], vocab_size, next_step)
    except Exception as error:
        is_launch = async_step is not None and async_step.has_failed_with(error)
        if is_launch or isinstance(error, DeviceError):
            raise  # no single request is at fault
        if async_step is not None:
            async_step.distrust(plan)
        _sample_each(batch, logits, ops, vocab_size)
        return
    for (part, _), one in zip(batch, sampled, strict=True):
        part.sampled = one


def _sample_each(
    batch: list[tuple[RequestLogits, RowSettings]],
    logits: PassLogits,
    ops: OpTable,
    vocab_size: int,
) -> None:
    """Repeat a failed call row by row, so that only the requests at fault fail.

    The settings hold the random numbers that were already taken: the other requests get the same
    tokens, and their random streams do not advance twice.
    """
    for part, settings in batch:
        with part.reply.guard:
            (part.sampled,) = logits.sample(ops, [settings], vocab_size)


def _num_rows(segment: Segment) -> int:
    if segment.logit_rows is LogitRows.NONE:
        return 0
    return len(segment.token_ids) if segment.logit_rows is LogitRows.ALL else 1
