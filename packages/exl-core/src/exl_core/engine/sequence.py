"""The running state of a request, as far as the scheduler is concerned: tokens and pages.

Text, sampling and times are the engine's. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from exl_core.cache.page_pool import NO_KEY, PageKey, page_key
from exl_core.engine.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """`max_len` is where it must end at the latest, prompt included.

    Tokens `[0, past_len)` are in the cache, on the pages `page_ids`. A sequence that waits, for the
    first time or because its pages were needed elsewhere, has neither.
    """

    request: Request
    max_len: int
    token_ids: list[int]
    past_len: int = 0
    page_ids: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    """Of the full pages of `token_ids`, as far as anyone asked."""
    cached_tokens: int | None = None
    """Found in the cache when it first ran; None before."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_missing(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.token_ids) - self.past_len

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def extend_keys(self, num_pages: int, page_size: int) -> list[PageKey]:
        """Keys of the first `num_pages` pages, all of them full."""
        while len(self.keys) < num_pages:
            start = len(self.keys) * page_size
            previous = self.keys[-1] if self.keys else NO_KEY
            self.keys.append(page_key(previous, self.token_ids[start : start + page_size]))
        return self.keys[:num_pages]
