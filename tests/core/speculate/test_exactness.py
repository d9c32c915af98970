"""Speculative decoding preserves the target distribution: chi-square tests over sequences.

The models are Markov chains over three tokens, so that the distribution of the next three tokens is
known exactly. A round follows the engine: a draft of three tokens, each verified by the sampler.
The first rejection ends the round, and three accepted tokens are followed by one more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.ops.open import get_table
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Draft, DraftJob
from exl_core.speculate.ngram import NgramDrafter
from support.scripted import ScriptedModel, ScriptedShape

VOCAB, GAMMA, LENGTH = 3, 3, 3
PROMPT = (1, 2, 0, 1)
ROUNDS = 600


def chain(seed: int) -> Tensor:
    """Logits of the next token after each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.2


TARGET, OTHER = chain(1), chain(2)


@dataclass(frozen=True)
class Played:
    token_ids: list[int]
    passes: int
    accepted: int


Propose = Callable[[list[int], int], Draft]
Make = Callable[[int, SamplerParams], Propose]


def play(propose: Propose, sampler: Sampler) -> Played:
    """The first `LENGTH` tokens after the prompt."""
    tokens, passes, accepted = list(PROMPT), 0, 0
    end = len(PROMPT) + LENGTH
    while len(tokens) < end:
        draft = propose(tokens, GAMMA)
        passes += 1
        for position in range(len(draft.token_ids) + 1):
            logits = TARGET[tokens[-1]]
            if position == len(draft.token_ids):
                tokens.append(sampler.sample(logits, tokens).token_id)
                break
            proposal = draft.token_ids[position]
            drawn_from = draft.probabilities[position] if draft.probabilities else None
            tokens.append(sampler.verify(logits, tokens, proposal, drawn_from).token_id)
            if tokens[-1] != proposal:
                break
            accepted += 1
    return Played(tokens[len(PROMPT) : end], passes, accepted)


def expected(temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `LENGTH` tokens."""
    logits = TARGET / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    step = logits.double().softmax(1)
    joint = {}
    for sequence in product(range(VOCAB), repeat=LENGTH):
        probability, last = 1.0, PROMPT[-1]
        for token in sequence:
            probability *= float(step[last, token])
            last = token
        joint[sequence] = probability
    return joint


def chi_square(played: list[Played], joint: dict[tuple[int, ...], float]) -> float:
    """Chi-square statistic in standard deviations above its mean. Rare sequences are pooled."""
    counts = dict.fromkeys(joint, 0)
    for each in played:
        counts[tuple(each.token_ids)] += 1
    pairs = [(counts[s], p * len(played)) for s, p in joint.items()]
    assert all(seen == 0 for seen, wanted in pairs if wanted == 0.0)
    common = [pair for pair in pairs if pair[1] >= 8]
    rare = [pair for pair in pairs if 0.0 < pair[1] < 8]
    if rare:
        common.append((sum(seen for seen, _ in rare), sum(wanted for _, wanted in rare)))
    value = sum((seen - wanted) ** 2 / wanted for seen, wanted in common)
    freedom = len(common) - 1
    return float((value - freedom) / (2 * freedom) ** 0.5)


def by_model(table: Tensor, min_probability: float = 0.0) -> Make:
    """Run the rounds with one drafter; each round is a separate request."""
    model = ScriptedModel(lambda history: table[history[-1]], ScriptedShape(vocab_size=VOCAB))
    drafter = ModelDrafter(
        model,
        vocab_size=VOCAB,
        num_pages=1,
        kv_format=KVFormat.FP32,
        max_tokens=GAMMA,
        min_probability=min_probability,
    )

    def make(seed: int, params: SamplerParams) -> Propose:
        def propose(tokens: list[int], most: int) -> Draft:
            return drafter.propose([DraftJob(f"{seed}", tokens, (0,), (), most, params)])[0]

        return propose

    return make


def by_lookup(seed: int, params: SamplerParams) -> Propose:
    drafter = NgramDrafter(max_tokens=GAMMA, min_match=1, min_confidence=0.0)

    def propose(tokens: list[int], most: int) -> Draft:
        return drafter.propose([DraftJob(f"{seed}", tokens, (0,), (), most, params)])[0]

    return propose


def played_by(
    make: Make, rounds: int, *, temperature: float = 1.0, top_k: int = 0
) -> tuple[list[Played], float]:
    """Run the rounds and return the deviation of their sequences from the exact distribution."""
    ops = get_table("reference", threads=1)
    played = []
    for seed in range(rounds):
        params = SamplerParams(temperature=temperature, top_k=top_k, seed=seed)
        played.append(play(make(seed, params), Sampler(params, ops)))
    return played, chi_square(played, expected(temperature, top_k))


MODES: dict[str, tuple[Tensor, float]] = {
    "another model": (OTHER, 0.0),
    "another model that stops when unsure": (OTHER, 0.5),
    "the model itself": (TARGET, 0.0),
}


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [ROUNDS, 10 * ROUNDS])
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_model_preserves_the_distribution(mode: str, rounds: int) -> None:
    table, least = MODES[mode]
    played, deviation = played_by(by_model(table, least), rounds)
    assert deviation < 4.0
    passes = sum(each.passes for each in played)
    if table is TARGET:
        # All three tokens are accepted, so that every reply takes one pass.
        assert passes == rounds
    else:
        assert 1.2 * rounds < passes < 2.9 * rounds


@pytest.mark.thorough
def test_truncating_samplers_preserve_the_distribution() -> None:
    played, deviation = played_by(by_model(OTHER), ROUNDS, temperature=0.8, top_k=2)
    assert deviation < 4.0
    assert sum(each.accepted for each in played) > 0.3 * ROUNDS


def test_lookup_drafts_yield_the_same_tokens_as_no_drafts() -> None:
    ops = get_table("reference", threads=1)
    shorter = 0
    for seed in range(100):
        params = SamplerParams(seed=seed)
        drafted = play(by_lookup(seed, params), Sampler(params, ops))
        plain = play(lambda _tokens, _most: Draft(), Sampler(params, ops))
        assert drafted.token_ids == plain.token_ids
        assert plain.passes == LENGTH
        shorter += drafted.passes < plain.passes
    assert shorter > 20


@pytest.mark.thorough
def test_the_statistic_detects_a_wrong_acceptance_rule() -> None:
    """Sampled from the draft's distribution, but verified as if it had been uniform."""
    drawing = by_model(OTHER)
    even = torch.full((VOCAB,), 1.0 / VOCAB)

    def careless(seed: int, params: SamplerParams) -> Propose:
        propose = drawing(seed, params)

        def wrong(tokens: list[int], most: int) -> Draft:
            token_ids = propose(tokens, most).token_ids
            return Draft(token_ids, (even,) * len(token_ids))

        return wrong

    _, deviation = played_by(careless, ROUNDS)
    assert deviation > 6.0
