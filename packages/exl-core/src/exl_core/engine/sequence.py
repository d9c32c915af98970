"""One sequence of a request as the scheduler sees it: its tokens, memory and limits.

Text, sampling and times belong to `ReplyState`. No torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from exl_core.cache.page_pool import NO_KEY, PageKey
from exl_core.cache.sequence_state import SequenceState
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
class RequestSequence:
    """The prompt of a request, or its negative prompt, with the reply so far.

    `max_len` is the largest allowed length, prompt included. `state` holds the tokens and their
    memory; a waiting sequence, new or preempted, has no memory.

    `negative` is the negative sequence under guidance: it runs in the same passes and gets the same
    sampled tokens.
    """

    request: Request
    max_len: int
    state: SequenceState
    negative: RequestSequence | None = None
    cached_tokens: int | None = None
    """Tokens found in the cache when the sequence first started; None before."""
    cached_pages: int | None = None
    """Full pages among them, which are shared and not copied."""
    scored_len: int = 1
    """Prompt tokens scored so far; the first has no prediction and counts as scored."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def token_ids(self) -> list[int]:
        return self.state.token_ids

    @property
    def past_len(self) -> int:
        return self.state.past_len

    @property
    def page_ids(self) -> list[int]:
        return self.state.page_ids

    @property
    def members(self) -> tuple[RequestSequence, ...]:
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
