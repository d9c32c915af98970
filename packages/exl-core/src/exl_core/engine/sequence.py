"""State of a sequence as the scheduler sees it: tokens and pages.

Text, sampling and times belong to `ReplyState`. No torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

from exl_core.cache.page_pool import NO_KEY, PageContents, PageKey, page_key
from exl_core.engine.request import Request

if TYPE_CHECKING:
    from exl_core.model.adapters import AdapterUse


def root_key(adapters: Iterable[AdapterUse]) -> PageKey:
    """Key that precedes the first page's: pages computed under different adapters must not match.

    The order of the adapters counts, since it may change how sums are rounded.
    """
    uses = [struct.pack("<qd", use.adapter.serial, use.scale) for use in adapters]
    return blake2b(b"".join(uses), digest_size=16).digest() if uses else NO_KEY


@dataclass(slots=True, eq=False)
class SequenceState:
    """Tokens of one sequence and their place in the cache.

    `max_len` is the largest allowed length, prompt included. Tokens `[0, past_len)` are cached, on
    the pages `page_ids`. A waiting sequence, new or preempted, has neither. The engine appends to
    `token_ids`; only the scheduler removes tokens.

    `negative` is the negative sequence under guidance: it runs in the same passes and gets the same
    sampled tokens.
    """

    request: Request
    max_len: int
    token_ids: list[int]
    negative: SequenceState | None = None
    past_len: int = 0
    page_ids: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    """Keys of the full pages of `token_ids`, computed on demand."""
    cached_tokens: int | None = None
    """Tokens found in the cache when the sequence first started; None before."""
    cached_pages: int | None = None
    """Full pages among them, which are shared and not copied."""
    scored_len: int = 1
    """Prompt tokens scored so far; the first has no prediction and counts as scored."""
    key_root: PageKey = field(init=False)

    def __post_init__(self) -> None:
        self.key_root = root_key(self.request.adapters)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def members(self) -> tuple[SequenceState, ...]:
        """Sequences that run together: this one and, under guidance, its negative sequence."""
        return (self,) if self.negative is None else (self, self.negative)

    @property
    def is_scored(self) -> bool:
        """Prompt tokens are still to be scored."""
        return self.request.report.prompt and self.scored_len < len(self.request.prompt_ids)

    @property
    def reusable_len(self) -> int:
        """Most tokens that may come from the cache.

        The last token is always computed, for its logits; so are all tokens that predict a token
        that is still to be scored.
        """
        return (self.scored_len if self.is_scored else len(self.token_ids)) - 1

    @property
    def num_missing(self) -> int:
        """Tokens that are not cached yet."""
        return len(self.token_ids) - self.past_len

    @property
    def num_jumps(self) -> int:
        """Pages that do not directly follow the previous page in memory."""
        return sum(page != before + 1 for before, page in pairwise(self.page_ids))

    def extend_keys(self, num_pages: int, page_size: int) -> list[PageKey]:
        """Keys of the first `num_pages` pages, which must be full."""
        while len(self.keys) < num_pages:
            start = len(self.keys) * page_size
            previous = self.keys[-1] if self.keys else self.key_root
            self.keys.append(page_key(previous, self.token_ids[start : start + page_size]))
        return self.keys[:num_pages]

    def key_before(self, page: int, page_size: int) -> PageKey:
        """Key of everything before this page of the sequence."""
        return self.extend_keys(page, page_size)[-1] if page else self.key_root

    def contents(self, page: int, length: int, page_size: int) -> PageContents:
        """Contents of the first `length` positions of this page of the sequence."""
        start = page * page_size
        token_ids = tuple(self.token_ids[start : start + length])
        previous = self.key_before(page, page_size)
        if length == page_size:
            return PageContents(previous, token_ids, self.extend_keys(page + 1, page_size)[page])
        return PageContents.of(previous, token_ids)

    def cut(self, length: int, page_size: int) -> None:
        """Keep the first `length` tokens only. Pages and `past_len` are not changed."""
        del self.token_ids[length:]
        del self.keys[length // page_size :]
