"""Segments: rows of one sequence in one pass. Plain data (ids and page numbers), no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl_core.model.adapters import AdapterUse
    from exl_core.model.embedded import EmbeddedSpan


class LogitRows(Enum):
    """For which rows of a segment the model computes logits."""

    NONE = "none"
    """A prompt chunk that is not the last one."""
    LAST = "last"
    """The last chunk of a prompt, or one token in decode."""
    ALL = "all"
    """Every token: the newest one followed by a draft, or a text to be scored."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt chunk, or the newest token of a reply followed by its draft.

    `page_ids` are the sequence's pages from its start, enough for the `past_len` cached tokens and
    this segment's. `adapters` apply to all rows of the segment. Ids from `EMBEDDED_FROM` on stand
    for the vectors of `embeddings`. `state_slot` is that of the sequence's recurrent state, which
    the pass changes.
    """

    token_ids: tuple[int, ...]
    past_len: int
    page_ids: tuple[int, ...]
    logit_rows: LogitRows
    adapters: tuple[AdapterUse, ...] = ()
    embeddings: tuple[EmbeddedSpan, ...] = ()
    state_slot: int | None = None

    def with_token(self, token_id: int, past_len: int, page_ids: tuple[int, ...]) -> Segment:
        """Another token of the same sequence. `dataclasses.replace` takes several times as long."""
        rest = self.adapters, self.embeddings, self.state_slot
        return Segment((token_id,), past_len, page_ids, self.logit_rows, *rest)

    def last_written_page(self, page_size: int) -> int:
        """Largest number of the pages that this segment writes."""
        end = self.past_len + len(self.token_ids)
        return max(self.page_ids[self.past_len // page_size : -(-end // page_size)])

    def slots(self, page_size: int) -> Iterator[range]:
        """Slots of the tokens' keys and values, one range per page: page_id * page_size +
        offset."""
        position, end = self.past_len, self.past_len + len(self.token_ids)
        while position < end:
            page, offset = divmod(position, page_size)
            count = min(page_size - offset, end - position)
            first = self.page_ids[page] * page_size + offset
            yield range(first, first + count)
            position += count
