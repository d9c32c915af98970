"""Steps that depend on history or on token ids: penalties, bans, biases, allowed tokens, DRY.

Each is a step with a value, as in `steps.py`. The arithmetic is in functions that return edits of
few tokens; the sampler calls these with the history that it keeps as an array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exl_core.ops.masks import unpack
from exl_core.ops.sampling import LogitEdits
from exl_core.sampling.steps import DROPPED, as_ids

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition, presence and frequency penalty, in this order.

    A token at distance d from the end (0 is the newest) has weight 1 up to `sustain`, then a weight
    that falls linearly to 0 over `decay` tokens. The repetition penalty divides the positive logits
    of tokens that occurred by 1 + (repetition - 1) * weight, and multiplies negative logits by it.
    The presence penalty times the weight is subtracted. Both use a token's newest occurrence; the
    frequency penalty uses all of them.
    """

    token_ids: tuple[int, ...]
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    sustain: int | None = None
    decay: int = 0

    def __call__(self, logits: Tensor) -> Tensor:
        history = np.array(self.token_ids, dtype=np.int64)
        return edited(logits, penalty_edits(history, self, len(logits)))


@dataclass(frozen=True, slots=True)
class Ban:
    """Drop these tokens."""

    token_ids: frozenset[int]

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.index_fill(0, as_ids(self.token_ids, len(logits)), DROPPED)


@dataclass(frozen=True, slots=True)
class Allow:
    """Drop all other tokens."""

    token_ids: frozenset[int]

    def __call__(self, logits: Tensor) -> Tensor:
        ids = as_ids(self.token_ids, len(logits))
        return torch.full_like(logits, DROPPED).index_copy_(0, ids, logits[ids])


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Drop the tokens whose bit is not set: bit i % 32 of word i // 32 belongs to token i."""

    words: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(~unpack(self.words, len(logits)), DROPPED)


@dataclass(frozen=True, slots=True)
class Bias:
    """Add to the logits of these tokens."""

    bias: Mapping[int, float]

    def __call__(self, logits: Tensor) -> Tensor:
        return edited(logits, bias_edits(self.bias, len(logits)))


@dataclass(frozen=True, slots=True)
class Dry:
    """DRY: penalize tokens that would continue a repetition.

    The repetition is the longest suffix of the history, up to `max_ngram` - 1 tokens, that occurred
    earlier and was followed by a token. Each token that followed it loses
    multiplier * base ** (length - allowed_length) per occurrence. Repetitions shorter than
    `allowed_length` (at least 1) are free. With `search_range`, occurrences count only if they
    begin within that many latest tokens. The newest token does not count as a follower. Breakers
    and ids outside the vocabulary end a repetition and are never penalized.
    """

    token_ids: tuple[int, ...]
    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    search_range: int = 0
    max_ngram: int = 20
    breakers: frozenset[int] = frozenset()

    def __call__(self, logits: Tensor) -> Tensor:
        history = np.array(self.token_ids, dtype=np.int64)
        return edited(logits, dry_edits(history, self, len(logits)))


def edited(logits: Tensor, edits: LogitEdits) -> Tensor:
    """New logits with the edits applied."""
    ids, factors, offsets = edits
    was = logits[ids]
    changed = logits.clone()
    changed[ids] = torch.where(was > 0.0, was / factors, was * factors) + offsets
    return changed


def merged(parts: Sequence[LogitEdits]) -> LogitEdits:
    """One edit for each token of `parts`. Only the first part has factors other than 1."""
    if len(parts) == 1:
        return parts[0]
    joined = LogitEdits._make(map(torch.cat, zip(*parts, strict=True)))
    ids, at = torch.unique(joined.ids, return_inverse=True)
    factors, offsets = torch.ones(len(ids)), torch.zeros(len(ids))
    factors[at[: len(parts[0].ids)]] = parts[0].factors
    return LogitEdits(ids, factors, offsets.index_add_(0, at, joined.offsets))


def shifts(ids: Tensor, offsets: Tensor) -> LogitEdits:
    """Edits that add to logits without a factor."""
    return LogitEdits(ids, torch.ones(len(ids)), offsets)


def penalty_edits(history: Ids, rule: Penalties, vocab_size: int) -> LogitEdits:
    """One edit for each distinct token of the history that the penalties reach."""
    if rule.sustain is not None:
        history = history[max(0, len(history) - rule.sustain - rule.decay) :]
    distance = np.arange(len(history) - 1, -1, -1, dtype=np.float32)
    if len(history) > 0 and int(history.max()) >= vocab_size:
        is_token = history < vocab_size
        history, distance = history[is_token], distance[is_token]
    # The first occurrence of a token in the reversed history is its newest one.
    ids, newest, index = np.unique(history[::-1], return_index=True, return_inverse=True)
    weight = np.ones(len(history), dtype=np.float32)
    if rule.sustain is not None and rule.decay > 0:
        weight = np.clip(1.0 - (distance[::-1] - rule.sustain) / rule.decay, 0.0, 1.0)
    factors = np.float32(1.0) + np.float32(rule.repetition - 1.0) * weight[newest]
    offsets = np.float32(-rule.presence) * weight[newest]
    if rule.frequency != 0.0:
        offsets -= rule.frequency * np.bincount(index, weights=weight, minlength=len(ids))
    return LogitEdits(*map(torch.from_numpy, (ids, factors, offsets)))


def uniform_penalty_edits(distinct: Ids, rule: Penalties, vocab_size: int) -> LogitEdits:
    """`penalty_edits` of penalties without range, decay and frequency, from the distinct tokens."""
    ids = torch.from_numpy(distinct)
    if len(distinct) > 0 and int(distinct.max()) >= vocab_size:
        ids = ids[ids < vocab_size]
    # Settings may be integers, from which `torch.full` would make a tensor of integers.
    factors = torch.full((len(ids),), float(rule.repetition))
    return LogitEdits(ids, factors, torch.full((len(ids),), -float(rule.presence)))


def dry_edits(history: Ids, rule: Dry, vocab_size: int) -> LogitEdits:
    """One edit for each token that would continue the longest repetition."""
    count = len(history)
    reach = _reach(history, rule, vocab_size)
    # Ends of earlier occurrences. The newest token is no follower, so they come before the last
    # two tokens.
    ends = np.flatnonzero(history[: max(count - 2, 0)] == history[-1]) if reach > 0 else _NONE
    followers = history[ends + 1]
    is_open = followers < vocab_size
    if rule.breakers:
        is_open &= ~np.isin(followers, np.fromiter(rule.breakers, dtype=np.int64))
    first = count - rule.search_range if rule.search_range > 0 else 0
    ends = ends[is_open & (ends >= first)]
    length = 1
    while length < reach and len(ends) > 0:
        longer = ends[ends >= max(first, 0) + length]
        longer = longer[history[longer - length] == history[count - 1 - length]]
        if len(longer) == 0:
            break
        ends, length = longer, length + 1
    allowed = max(rule.allowed_length, 1)
    if len(ends) == 0 or length < allowed:
        return shifts(torch.empty(0, dtype=torch.int64), torch.empty(0))
    ids, counts = np.unique(history[ends + 1], return_counts=True)
    try:
        loss = rule.multiplier * math.pow(rule.base, length - allowed)
    except OverflowError:
        loss = _LARGEST_LOSS
    # Finite, so that a token remains even if every allowed token would continue a repetition.
    losses = np.minimum(loss * counts, _LARGEST_LOSS).astype(np.float32)
    return shifts(torch.from_numpy(ids), torch.from_numpy(-losses))


_NONE = np.empty(0, dtype=np.int64)
_LARGEST_LOSS = 1e30


def _reach(history: Ids, rule: Dry, vocab_size: int) -> int:
    """Longest possible repetition at the end of the history."""
    for length in range(min(rule.max_ngram - 1, len(history))):
        token_id = int(history[len(history) - 1 - length])
        if token_id >= vocab_size or token_id in rule.breakers:
            return length
    return min(rule.max_ngram - 1, len(history))


def bias_edits(bias: Mapping[int, float], vocab_size: int) -> LogitEdits:
    ids = as_ids(frozenset(bias), vocab_size)
    return shifts(ids, torch.tensor([bias[i] for i in ids.tolist()], dtype=torch.float32))
