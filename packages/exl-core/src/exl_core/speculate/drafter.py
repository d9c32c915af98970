"""What a drafter is: something cheap that guesses the next tokens, for the model to check at once.

A draft never changes what is generated, only how many passes it takes: each guess is checked
against the model's own distribution. Nothing here knows the model, the scheduler or text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exl_core.cache.page_pool import PageKey
from exl_core.sampling.params import SamplerParams


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A sequence that decodes one token now, and how much may be guessed behind it.

    `token_ids` is the live sequence, prompt and reply, newest last. `page_ids` are its pages, with
    room for all tokens and `max_tokens` more; `page_keys` name its full pages, first to last.
    """

    request_id: str
    token_ids: Sequence[int]
    page_ids: tuple[int, ...]
    page_keys: Sequence[PageKey]
    max_tokens: int
    sampler: SamplerParams


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses, next token first; none at all is a good answer where nothing can be known.

    `probabilities` are the distributions that the guesses were drawn from, one float32
    [vocab_size] for each; None: nothing was drawn, these are the only guesses there could be.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: tuple[Tensor, ...] | None = None


NO_DRAFT = Draft()


class Drafter(Protocol):
    @property
    def max_tokens(self) -> int:
        """Most tokens of one draft, whatever a job allows."""
        ...

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """One draft for each job, of at most its `max_tokens`. The jobs' requests all differ."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended. One that was never seen is no error."""
        ...

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        """The contents of pages went elsewhere, all at once: (from, to)."""
        ...
