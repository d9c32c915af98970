"""What the scheduler decides for one pass. Plain data: token ids and page numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LogitRows(Enum):
    """For which rows of a segment the model computes logits."""

    NONE = "none"
    """A chunk of a prompt that goes on."""
    LAST = "last"
    """The end of a prompt, or one decoded token."""
    ALL = "all"
    """Every token is scored."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence: a chunk of a prompt, or the newest token of a reply.

    `page_ids` are the pages of the sequence from its start, enough for `past_len` cached tokens and
    these. `request_id` says whose it is; the runner does not read it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    past_len: int
    page_ids: tuple[int, ...]
    logit_rows: LogitRows


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The segments of one pass, decoding sequences first, each group in order of arrival."""

    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)
