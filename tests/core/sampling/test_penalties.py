"""Steps that depend on history, compared with plain implementations of their definitions."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_core.ops.masks import pack, unpack
from exl_core.ops.open import get_table
from exl_core.sampling.chain import steps_for
from exl_core.sampling.edits import Edits
from exl_core.sampling.history import History
from exl_core.sampling.params import SamplerParams, TokenBias
from exl_core.sampling.penalties import Allow, Ban, Bias, Dry, Mask, Penalties, edited
from exl_core.sampling.sampler import Sampler
from support.profiles import examples

VOCAB = 32


def random_logits(seed: int, count: int = VOCAB) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3


def penalized(row: list[float], rule: Penalties) -> list[float]:
    """Reference: position by position, newest first."""
    s = math.inf if rule.sustain is None else rule.sustain
    d_max = math.inf if rule.sustain is None else s + rule.decay
    row, seen = list(row), set()
    for d, token in enumerate(reversed(rule.token_ids)):
        if d >= d_max:
            break
        w = 1.0 if d <= s else 1 - (d - s) / rule.decay
        if token >= len(row):
            continue
        if token not in seen:
            seen.add(token)
            factor = 1 + (rule.repetition - 1) * w
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
            row[token] -= rule.presence * w
        row[token] -= rule.frequency * w
    return row


@settings(max_examples=examples(200))
@given(
    history=st.lists(st.integers(0, VOCAB + 4), max_size=30),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.2]),
    presence=st.sampled_from([0.0, 0.7]),
    sustain=st.sampled_from([None, 0, 1, 5, 100]),
    decay=st.sampled_from([0, 1, 4, 50]),
)
def test_penalties_match_their_definition(
    *,
    history: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    sustain: int | None,
    decay: int,
) -> None:
    rule = Penalties(tuple(history), repetition, frequency, presence, sustain, decay)
    logits = random_logits(len(history))
    got = rule(logits).double()
    exact = torch.tensor(penalized(logits.tolist(), rule), dtype=torch.float64)
    # Up to 30 occurrences, each with one rounding of a value below 30; a few roundings besides.
    assert torch.allclose(got, exact, rtol=0, atol=30 * 40 * 2**-24)


def test_the_penalty_fades_with_the_distance() -> None:
    rule = Penalties(tuple(range(8)), repetition=2.0, sustain=2, decay=4)
    factors = [1, 1, 1.25, 1.5, 1.75, 2, 2, 2]  # the newest last
    assert (torch.ones(8) / rule(torch.ones(8))).tolist() == pytest.approx(factors, rel=1e-6)
    assert (-rule(-torch.ones(8))).tolist() == factors
    sharp = Penalties(tuple(range(8)), repetition=2.0, sustain=2)
    assert (torch.ones(8) / sharp(torch.ones(8))).flip(0).tolist() == [2, 2, 1, 1, 1, 1, 1, 1]


def test_frequency_penalty_counts_occurrences_and_repetition_does_not() -> None:
    logits = torch.full((3,), 4.0)
    assert Penalties((1, 1, 1), repetition=2.0)(logits).tolist() == [4, 2, 4]
    assert Penalties((1, 1, 1), presence=0.5)(logits).tolist() == [4, 3.5, 4]
    assert Penalties((1, 1, 1), frequency=0.5)(logits).tolist() == [4, 2.5, 4]
    both = Penalties((1, 1), repetition=2.0, presence=1.0, frequency=0.25)
    assert both(logits).tolist() == [4, 0.5, 4]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("banned", [frozenset(), frozenset({4})], ids=["alone", "and bans"])
def test_penalties_may_be_integers(name: str, banned: frozenset[int]) -> None:
    logits, ops = random_logits(3), get_table("cpu", threads=1)
    given = [SamplerParams.from_mapping({name: value, "seed": 1}) for value in (2, 2.0)]

    integer, floating = (
        Sampler(params, ops).sample(logits, [1, 2, 2], banned=banned, num_top=VOCAB)
        for params in given
    )

    assert integer == floating


def test_bans_biases_and_allowed_tokens_ignore_ids_outside() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    assert Ban(frozenset({0, 9}))(logits).tolist() == [-math.inf, 2, 3]
    assert Allow(frozenset({0, 9}))(logits).tolist() == [1, -math.inf, -math.inf]
    bias = TokenBias({1: 0.5, 2: -math.inf, 9: 1.0})
    assert Bias(bias)(logits).tolist() == [1, 2.5, -math.inf]
    assert Mask(torch.tensor([0b110]))(logits).tolist() == [-math.inf, 2, 3]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 4097])
def test_masks_are_packed_bit_by_bit(vocab: int) -> None:
    chosen = frozenset(random.Random(vocab).sample(range(vocab), vocab // 2 + 1))
    words = pack(chosen | {vocab}, vocab)
    assert words.dtype == torch.int32
    assert len(words) == -(-vocab // 32)
    numbers = [word % 2**32 for word in words.tolist()]
    assert {i for i in range(vocab) if numbers[i // 32] >> (i % 32) & 1} == chosen
    assert set(unpack(words, vocab).nonzero().flatten().tolist()) == chosen


def dry(row: list[float], rule: Dry) -> list[float]:
    """Reference: count every n-gram, then find the longest suffix of the history that occurs."""
    ids, n, row = rule.token_ids, len(rule.token_ids), list(row)

    def is_open(token: int) -> bool:
        return token < len(row) and token not in rule.breakers

    counts: Counter[tuple[int, ...]] = Counter()
    first = n - rule.search_range if rule.search_range > 0 else 0
    for start in range(max(first, 0), n - 1):
        for end in range(start + 2, min(start + rule.max_ngram, n - 1) + 1):
            if all(is_open(token) for token in ids[start:end]):
                counts[ids[start:end]] += 1
    allowed = max(rule.allowed_length, 1)
    for length in range(min(rule.max_ngram - 1, n), allowed - 1, -1):
        suffix = ids[n - length :]
        followers = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == suffix}
        if followers:
            for token, count in followers.items():
                row[token] -= rule.multiplier * rule.base ** (length - allowed) * count
            break
    return row


@settings(max_examples=examples(300))
@given(
    history=st.lists(st.integers(0, 4), max_size=60),
    base=st.sampled_from([0.5, 1.0, 1.75]),
    allowed=st.sampled_from([0, 1, 2, 5]),
    max_ngram=st.sampled_from([2, 3, 6, 20]),
    search_range=st.sampled_from([0, 21, 40]),
    breakers=st.sampled_from([frozenset[int](), frozenset({3})]),
)
def test_dry_matches_its_definition(
    *,
    history: list[int],
    base: float,
    allowed: int,
    max_ngram: int,
    search_range: int,
    breakers: frozenset[int],
) -> None:
    rule = Dry(tuple(history), 0.8, base, allowed, search_range, max_ngram, breakers)
    logits = torch.zeros(4)  # 4 is outside
    assert rule(logits).tolist() == pytest.approx(dry([0.0] * 4, rule), rel=1e-6)


@pytest.mark.parametrize(
    ("history", "loss"),
    [
        ((1, 2, 3, 9, 1, 2, 3), 1.75),
        ((1, 2, 3, 9, 5, 1, 2, 3, 9, 6, 1, 2, 3), 3.5),
        ((2, 3, 9, 1, 2, 3), 1.0),
        ((3, 9, 1, 2, 3), 0.0),
    ],
)
def test_dry_counts_earlier_occurrences(history: tuple[int, ...], loss: float) -> None:
    after = Dry(history, multiplier=1.0)(torch.zeros(10))
    assert after.tolist() == [0.0] * 9 + [-loss]


@pytest.mark.parametrize("run", [18, 19, 20, 25, 60])
def test_dry_handles_long_repetitions(run: int) -> None:
    words = list(range(run))
    history = (*words, 99, 100, *words)
    after = Dry(history, multiplier=1.0)(torch.zeros(101))
    longest = min(run, 19)
    assert after[99] == pytest.approx(-(1.75 ** (longest - 2)), rel=1e-6)
    assert int((after != 0).sum()) == 1


def test_dry_treats_an_allowed_length_of_zero_as_one() -> None:
    history = (1, 2, 3, 1)
    logits = torch.zeros(5)
    zero, one = (Dry(history, 1.0, allowed_length=length)(logits) for length in (0, 1))
    assert zero.tolist() == one.tolist() == [0, 0, -1, 0, 0]


def test_a_dry_penalty_that_overflows_stays_finite() -> None:
    history = (*range(300), 300, *range(300))
    after = Dry(history, 1.0, base=100.0, max_ngram=300)(torch.zeros(301))
    assert after[300] == pytest.approx(-1e30)


histories = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 40), max_size=20)),
        st.tuples(st.just("cut"), st.integers(0, 15)),
    ),
    max_size=30,
)


@settings(max_examples=examples(150))
@given(moves=histories)
def test_the_history_mirrors_its_list(moves: list[tuple[str, object]]) -> None:
    follower, ids = History(), list[int]()
    for move, what in moves:
        if move == "add":
            assert isinstance(what, list)
            ids += what
        else:
            assert isinstance(what, int)
            del ids[len(ids) - min(what, len(ids)) :]
            follower.rewind(len(ids))
            ids.append(7)  # the next token differs from the removed one
        assert follower.follow(ids).tolist() == ids
        assert follower.distinct.tolist() == list(dict.fromkeys(ids))


def test_the_history_grows_beyond_its_first_buffer() -> None:
    follower = History()
    for length in (10, 300, 5000):
        assert follower.follow(range(length)).tolist() == list(range(length))
        assert follower.distinct.tolist() == list(range(length))


EDITS = [
    SamplerParams(),
    SamplerParams(repetition_penalty=1.3),
    SamplerParams(presence_penalty=0.3, penalty_range=5),
    SamplerParams(frequency_penalty=0.3, token_bias={3: 1.0, 4: -math.inf}),
    SamplerParams(dry_multiplier=0.8, dry_allowed_length=1),
    SamplerParams(repetition_penalty=1.3, dry_multiplier=0.8, banned_tokens=frozenset({1, 40})),
    SamplerParams(token_bias={3: 1.0, 99: 2.0}, banned_tokens=frozenset({3})),
    SamplerParams(repetition_penalty=1.1, penalty_range=4, penalty_decay=3, dry_multiplier=1.0),
    SamplerParams(allowed_tokens=frozenset(range(20)), banned_tokens=frozenset({2})),
]


@pytest.mark.parametrize("params", EDITS, ids=lambda p: f"edits{EDITS.index(p)}")
@pytest.mark.parametrize("has_mask", [False, True])
def test_edits_equal_the_steps(params: SamplerParams, has_mask: bool) -> None:
    """Edits and their result, along a history that grows and is rewound."""
    edits = Edits(params)
    mask = pack(frozenset(range(5, 32)), VOCAB) if has_mask else None
    history: list[int] = []
    for turn in range(40):
        logits = random_logits(turn)
        before = logits.clone()
        banned = {turn % 8} if turn % 3 == 0 else set()
        expected = logits
        for step in steps_for(params, history, banned, mask):
            expected = step(expected)
        found = edits.dense(logits, history, banned, mask)
        # The offsets of a token are added up before the logit: two roundings of values below 64.
        assert torch.allclose(found, expected, rtol=0, atol=2 * 64 * 2**-24)
        changes = edits.edits(history, banned, VOCAB)
        row = logits if changes is None else edited(logits, changes)
        assert changes is None or len(changes.ids.unique()) == len(changes.ids)
        allowed = edits.allowed(mask, VOCAB)
        assert torch.equal(row if allowed is None else Mask(allowed)(row), found)
        assert torch.equal(logits, before)
        history += [turn % 5, turn % 3, turn % 5 + 30][: turn % 4]
        if turn % 11 == 10:
            del history[-7:]
            edits.rewind(len(history))
