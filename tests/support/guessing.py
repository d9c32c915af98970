"""Scripted drafters, whose drafts are known in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exl_core.speculate.drafter import Draft, DraftJob
from support.scripted import Rule

Guess = Callable[[Sequence[int]], int]
"""Maps all tokens so far to the drafted next token."""


@dataclass
class ScriptedDrafter:
    """Drafter that follows `guess`.

    excess   number of tokens that each draft exceeds its limit by
    failure  raised by the next call, once set
    known    requests that it drafted for and has not been asked to forget
    """

    guess: Guess
    max_tokens: int = 4
    excess: int = 0
    failure: BaseException | None = None
    known: set[str] = field(default_factory=set)
    num_proposed: int = 0

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        assert len({job.request_id for job in jobs}) == len(jobs)
        self.known |= {job.request_id for job in jobs}
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return [self._propose(job) for job in jobs]

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        pass

    def _propose(self, job: DraftJob) -> Draft:
        capacity = len(job.page_ids) * 256 - len(job.token_ids)
        assert 1 <= job.max_tokens <= min(capacity, self.max_tokens)
        token_ids = list(job.token_ids)
        for _ in range(job.max_tokens + self.excess):
            token_ids.append(self.guess(token_ids))
        self.num_proposed += 1
        return Draft(tuple(token_ids[len(job.token_ids) :]))


@dataclass
class DrawingDrafter(ScriptedDrafter):
    """Samples drafts from one fixed distribution."""

    spread: Tensor = field(default_factory=lambda: torch.ones(1))

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def _propose(self, job: DraftJob) -> Draft:
        sampled = torch.multinomial(
            self.spread, job.max_tokens, replacement=True, generator=self._generator
        )
        self.num_proposed += 1
        return Draft(tuple(sampled.tolist()), (self.spread,) * job.max_tokens)


def right(rule: Rule) -> Guess:
    """Drafts the likeliest token of the model."""
    return lambda history: int(rule(history).argmax())


def half_right(rule: Rule) -> Guess:
    """Drafts another token at some positions, which depend on the history."""
    return lambda history: int(rule(history).argmax()) ^ (sum(history[-3:]) % 3 == 0)


def wrong(rule: Rule) -> Guess:
    return lambda history: int(rule(history).argmin())
