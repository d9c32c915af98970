"""Consecutive tokens of one sequence in one pass. Plain data: ids and page numbers, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from exl_core.model.adapters import AdapterUse
    from exl_core.model.embedded import EmbeddedSpan


class LogitRows(Enum):
    """For which rows of a segment the model computes logits."""

    NONE = "none"
    """A chunk of a prompt that goes on."""
    LAST = "last"
    """The end of a prompt, or one decoded token."""
    ALL = "all"
    """Every token: the newest one with a draft behind it, or a text that is scored."""


class PageCopy(NamedTuple):
    """The first `length` positions of page `source` go to page `target`, in every layer."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A chunk of a prompt, or the newest token of a reply and what is drafted behind it.

    `page_ids` are the pages of the sequence from its start, enough for `past_len` cached tokens and
    these. `adapters` are applied to these rows; ids from `EMBEDDED_FROM` on stand for the vectors
    of `embeddings`.
    """

    token_ids: tuple[int, ...]
    past_len: int
    page_ids: tuple[int, ...]
    logit_rows: LogitRows
    adapters: tuple[AdapterUse, ...] = ()
    embeddings: tuple[EmbeddedSpan, ...] = ()

    def slots(self, page_size: int) -> Iterator[range]:
        """Where its tokens' keys and values go, page by page: page number * page_size + offset."""
        position, end = self.past_len, self.past_len + len(self.token_ids)
        while position < end:
            page, offset = divmod(position, page_size)
            count = min(page_size - offset, end - position)
            first = self.page_ids[page] * page_size + offset
            yield range(first, first + count)
            position += count
