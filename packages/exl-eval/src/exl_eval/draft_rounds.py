"""Speculative rounds of one reply: drafted tokens, accepted tokens, acceptance probabilities.

A round is a forward pass of the target model that emits tokens. The pass that computes the prompt
is not a round. A draft position is verified if no earlier position of its round was rejected. At
verified positions both the target's distribution p and the draft's q are known. The probability of
acceptance there is the sum over x of min(p(x), q(x)). The mean of these probabilities is alpha; it
has less noise than the share of accepted tokens. A draft token that was not sampled (n-gram, greedy
draft) has a q with all mass on that token. So has p if the request is greedy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishEvent, SampledToken
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.driver import stream
from exl_core.speculate.drafter import Draft, Drafter, DraftJob
from exl_core.speculate.stats import DraftStats


@dataclass(frozen=True, slots=True)
class Round:
    """Counts of one round. `chances`: acceptance probability of each verified draft token."""

    drafted: int
    accepted: int
    emitted: int
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rounds of one reply. `end.drafting` counts the prompt's pass as a round with one token;
    `rounds` omits it."""

    rounds: tuple[Round, ...]
    end: FinishEvent


class RecordingDrafter:
    """Wraps a drafter and records its drafts and the time of each."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._drafts: dict[str, dict[int, Draft]] = {}
        self.seconds_per_token: list[float] = []
        """One entry per draft, except the first of a request: that one may include the prompt."""

    @property
    def max_tokens(self) -> int:
        return self._drafter.max_tokens

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        started = time.perf_counter()
        drafts = self._drafter.propose(jobs)
        seconds = (time.perf_counter() - started) / len(jobs)
        for job, draft in zip(jobs, drafts, strict=True):
            known = self._drafts.setdefault(job.request_id, {})
            if known and draft.token_ids:
                self.seconds_per_token.append(seconds / len(draft.token_ids))
            known[len(job.token_ids)] = draft
        return drafts

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        self._drafter.moved(moves)

    def take(self, request_id: str) -> dict[int, Draft]:
        """Returns and forgets the drafts of a request, keyed by the length of the text before."""
        return self._drafts.pop(request_id, {})


def record_reply(engine: Engine, recorder: RecordingDrafter, request: Request) -> Recorded:
    """Runs one request alone; `recorder` must be the engine's drafter.

    A request that is not greedy must have temperature 1, no other sampler setting, and must report
    its logits.
    """
    sampler = request.sampler
    if not sampler.is_greedy and (sampler.temperature != 1.0 or not request.report.logits):
        raise RequestError(
            "acceptance probabilities need a greedy request, or temperature 1 with logits reported",
            got=f"temperature {sampler.temperature:g}",
        )
    tokens: list[SampledToken] = []
    end: FinishEvent | None = None
    for event in stream(engine, request):
        tokens += event.tokens
        if isinstance(event, FinishEvent):
            end = event
    assert end is not None
    rows = None if sampler.is_greedy else [token.logits for token in tokens]
    drafts = recorder.take(request.request_id)
    rounds = list(_rounds_of(drafts, end.token_ids, len(request.prompt_ids), rows))
    return Recorded(tuple(rounds), end)


def count(rounds: Iterable[Round]) -> DraftStats:
    total = DraftStats()
    for one in rounds:
        total = total.with_round(drafted=one.drafted, accepted=one.accepted, emitted=one.emitted)
    return total


def _rounds_of(
    drafts: dict[int, Draft],
    reply: Sequence[int],
    prompt_tokens: int,
    rows: list[Tensor | None] | None,
) -> Iterable[Round]:
    """Splits a reply into rounds. `rows` has the logits of each token; None for greedy replies."""
    place = 0  # in the reply
    while place < len(reply):
        draft = drafts.get(prompt_tokens + place, Draft())
        guesses = draft.token_ids[: len(reply) - place]
        accepted = 0
        chances = []
        for offset, guess in enumerate(guesses):
            chances.append(_chance(draft, offset, reply[place + offset], rows, place + offset))
            if guess != reply[place + offset]:
                break
            accepted += 1
        emitted = min(accepted + 1, len(reply) - place)
        if place > 0 or draft.token_ids:
            yield Round(len(draft.token_ids), accepted, emitted, tuple(chances))
        place += emitted


def _chance(
    draft: Draft, offset: int, token_id: int, rows: list[Tensor | None] | None, place: int
) -> float:
    """Probability that a draft token is accepted, over the randomness of draft and target."""
    guess = draft.token_ids[offset]
    if rows is None:
        return float(guess == token_id)
    logits = rows[place]
    assert logits is not None
    wanted = logits.double().softmax(0)  # [vocab_size]
    if draft.probabilities is None:
        return float(wanted[guess])
    drawn_from = draft.probabilities[offset].double()
    shared = min(len(wanted), len(drawn_from))
    overlap = float(wanted[:shared].minimum(drawn_from[:shared]).sum())
    return min(overlap, 1.0)  # the sum of equal distributions can round above one
