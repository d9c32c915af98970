"""What the scheduler decides for one pass. Plain data: token ids and page numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from exl_core.engine.sequence import SequenceState
from exl_core.model.segment import PageCopy, Segment


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The segments of one pass, decoding sequences first, each group in order of arrival.

    `sequences` says whose the segments are, one by one. Where the segment of a guided sequence asks
    for logits, the next segment is its negative sequence's and does, too. `copies` come before the
    pass, one after the other: a page may be copied to and then from, or copied from and then
    written.
    """

    segments: tuple[Segment, ...]
    sequences: tuple[SequenceState, ...]
    copies: tuple[PageCopy, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)
