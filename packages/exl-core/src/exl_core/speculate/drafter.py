"""Drafter protocol: a cheap guesser of the next tokens, which the target model verifies.

A draft changes the number of passes, never the distribution of the reply: each draft token is
verified against the model's own distribution. This module knows neither the model, the scheduler
nor text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from exl_core.cache.page_pool import NO_KEY, PageKey
from exl_core.cache.store import KVStore
from exl_core.sampling.params import SamplerParams


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A sequence that decodes one token now, and the limit of its draft.

    `token_ids` is the running sequence, prompt and reply, newest token last. `page_ids` are its
    pages, with capacity for all tokens and `max_tokens` more. `page_keys` are the keys of its full
    pages, first to last. `key_root` precedes the first key.
    """

    request_id: str
    token_ids: Sequence[int]
    page_ids: tuple[int, ...]
    page_keys: Sequence[PageKey]
    max_tokens: int
    sampler: SamplerParams
    key_root: PageKey = NO_KEY


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens, next token first; empty where the drafter has no guess.

    `probabilities` are the distributions that the tokens were sampled from, one float32
    [vocab_size] per token. None means that the draft is deterministic.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: tuple[Tensor, ...] | None = None


NO_DRAFT = Draft()


class Drafter(Protocol):
    @property
    def max_tokens(self) -> int:
        """Most tokens of one draft, regardless of the job's limit."""
        ...

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """One draft per job, of at most its `max_tokens`. All jobs belong to different requests."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended. Unknown requests are ignored."""
        ...

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        """Apply moves of page contents, (from, to) pairs that take effect at the same time."""
        ...


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """A drafter that reads the states which the target model computes for its tokens."""

    def attach(self, store: KVStore) -> None:
        """Called once, before the first proposal, with the cache of the target model. Its
        `final_states` hold the states of all tokens but the newest one of a sequence."""
        ...
