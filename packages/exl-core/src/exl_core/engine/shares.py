"""What one pass computed for each request, and the tokens that come of it.

The first tokens of all requests whose settings say everything are drawn at once; whatever depends
on another token of the same pass, or on more than settings, is drawn by its request's own sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from exl_core.engine.ahead import Ahead
from exl_core.engine.events import Event
from exl_core.engine.log_probs import score_prompt
from exl_core.engine.logits import LogitRow, PassLogits
from exl_core.engine.output import Output
from exl_core.engine.plan import BatchPlan
from exl_core.errors import DeviceError
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.table import Drawn, Onward, OpTable, RowSettings
from exl_core.speculate.drafter import Draft


class Taken(NamedTuple):
    """What one request took from a pass: `emitted` tokens, the first `accepted` as drafted."""

    drafted: int
    accepted: int
    emitted: int


@dataclass(slots=True)
class Share:
    """One request's part of a pass. Its failures end in `output.error`: the others go on."""

    output: Output
    rows: list[LogitRow]  # of the next token, and after each proposal
    unwanted: LogitRow | None  # of the negative prompt
    proposals: tuple[int, ...]
    drawn_from: tuple[Tensor, ...] | None  # the proposals, None: they are certain
    drawn: Drawn | None = None  # the next token

    def take(self, events: list[Event], clock: Callable[[], float]) -> Taken:
        """One token, and one for each proposal that holds."""
        emitted = accepted = 0
        # The others' logits may be fine, so they go on; what this one cached is not reused.
        with self.output.guard:
            for i, row in enumerate(self.rows if self.output.error is None else ()):
                events += self._take_one(i, row, clock())
                emitted += 1
                sequence = self.output.sequence
                if sequence.twin is not None:
                    sequence.twin.token_ids.append(sequence.token_ids[-1])
                is_accepted = i < len(self.proposals) and (
                    sequence.token_ids[-1] == self.proposals[i]
                )
                accepted += is_accepted
                has_turned = self.output.end is not None or self.output.rewind_to is not None
                if not is_accepted or has_turned:
                    break
        return Taken(len(self.proposals), accepted, emitted)

    def _take_one(self, i: int, row: LogitRow, now: float) -> list[Event]:
        proposal = None
        if self.drawn_from is not None and i < len(self.proposals):
            proposal = (self.proposals[i], self.drawn_from[i])
        return self.output.take(
            row,
            now,
            unwanted=self.unwanted,
            proposal=proposal,
            drawn=self.drawn if i == 0 else None,
        )


def shares_of(
    plan: BatchPlan,
    outputs: list[Output],
    logits: PassLogits,
    drafts: dict[str, Draft],
    events: list[Event],
) -> list[Share]:
    """Of those whose next token the pass gives; `outputs` go with the plan's segments. What prompts
    were scored is added to `events`."""
    shares = []
    row = 0
    for sequence, segment, output in zip(plan.sequences, plan.segments, outputs, strict=True):
        rows = [LogitRow(logits, i) for i in range(row, row + _num_rows(segment))]
        row += len(rows)
        if not rows or sequence is not output.sequence:
            continue
        is_scored = sequence.is_scored
        if is_scored:
            with output.guard:
                events += score_prompt(sequence, segment, logits.block(row - len(rows), row))
            if segment.past_len + len(segment.token_ids) < len(sequence.token_ids):
                continue
            rows = rows[-1:]
        draft = drafts.get(sequence.request_id)
        shares.append(
            Share(
                output,
                rows,
                # The twin's row comes next.
                unwanted=None if sequence.twin is None else LogitRow(logits, row),
                proposals=()
                if is_scored or segment.logit_rows is not LogitRows.ALL
                else segment.token_ids[1:],
                drawn_from=None if draft is None else draft.probabilities,
            )
        )
    return shares


def draw_together(
    shares: list[Share],
    plan: BatchPlan,
    logits: PassLogits,
    ops: OpTable,
    *,
    vocab_size: int,
    ahead: Ahead | None,
) -> None:
    """The next token of all whose settings say everything, by one call; where that is all there
    are, `ahead` begins the pass that they lead to."""
    begun: list[tuple[Share, RowSettings]] = []
    for share in shares:
        if share.output.error is not None or share.unwanted is not None:
            continue
        if share.drawn_from is not None and share.proposals:
            continue
        settings: RowSettings | None = None
        with share.output.guard:
            settings = share.output.begin(share.rows[0].number)
        if settings is not None:
            begun.append((share, settings))
    onward: Onward | None = None
    if ahead is not None and len(begun) == len(shares):
        onward = ahead.onward(plan, logits)
    try:
        drawn = logits.draw(ops, [settings for _, settings in begun], vocab_size, onward)
    except Exception as error:
        if isinstance(error, DeviceError) or (ahead is not None and ahead.has_failed_with(error)):
            raise  # no single request is at fault
        if ahead is not None:
            ahead.drop()
        _draw_one_by_one(begun, logits, ops, vocab_size)
        return
    for (share, _), one in zip(begun, drawn, strict=True):
        share.drawn = one


def _draw_one_by_one(
    begun: list[tuple[Share, RowSettings]], logits: PassLogits, ops: OpTable, vocab_size: int
) -> None:
    """After a call for all that failed: those at fault fail by themselves, the others get their
    tokens. The settings hold the random numbers, so that nothing is drawn twice."""
    for share, settings in begun:
        with share.output.guard:
            (share.drawn,) = logits.draw(ops, [settings], vocab_size)


def _num_rows(segment: Segment) -> int:
    if segment.logit_rows is LogitRows.NONE:
        return 0
    return len(segment.token_ids) if segment.logit_rows is LogitRows.ALL else 1
