"""Result of scheduling for one pass. Plain data: token ids and page numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from exl_core.cache.page_pool import PageCopy
from exl_core.cache.state import StateCopy
from exl_core.engine.sequence import RequestSequence
from exl_core.model.segment import Segment


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Segments of one pass: decoding sequences first, each group in order of arrival.

    `sequences` has one item per segment. If the segment of a guided sequence produces logits, the
    next segment is that of its negative sequence and produces logits too. `copies` run before the
    pass, in order: a page may be the target of a copy and then its source, or the source of a copy
    and then be written. So do `state_copies`, between slots of recurrent state.
    """

    segments: tuple[Segment, ...]
    sequences: tuple[RequestSequence, ...]
    copies: tuple[PageCopy, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)
