"""Sampler settings, rows of logits and masks for the tests of `sample` and `sample_rows`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.reference.sampling import ReferenceSamplingOps
from exl_core.ops.sampling import LogitEdits, RowSettings, Sampled

CHAINS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.01},
    "hot": {"temperature": 100.0, "top_p": 0.9},
    "greedy": {"top_k": 1},
    "top-k": {"top_k": 40},
    "wide top-k": {"top_k": 700, "temperature": 0.7},
    "wide top-k, top-p": {"top_k": 700, "top_p": 0.9, "min_p": 0.001},
    "all of top-k": {"top_k": 10**12, "top_p": 0.5},
    "top-p": {"top_p": 0.95},
    "narrow": {"top_p": 1e-9},
    "wide": {"top_p": 0.999999},
    "min-p": {"min_p": 0.05},
    "only the best": {"min_p": 1.0},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top-p, min-p": {"temperature": 1.3, "top_p": 0.7, "min_p": 0.3},
}


def rows_of(rng: torch.Generator, vocab: int) -> dict[str, Tensor]:
    noise = torch.randn(vocab, generator=rng)
    peaked = noise - 8
    peaked[torch.randperm(vocab, generator=rng)[:30]] += 9
    dropped = noise.clone()
    dropped[torch.rand(vocab, generator=rng) < 0.7] = -math.inf
    dropped[vocab // 2] = 0.5
    steep = torch.linspace(0, -200, vocab)
    return {
        "flat": torch.zeros(vocab),
        "narrow": noise * 0.02 + 50,
        "broad": noise * 3,
        "sharp": noise * 30 - 1000,
        "peaked": peaked,
        "levels": (noise * 4).round() / 4,
        "dropped": dropped,
        "signed zeros": torch.where(noise > 0, 0.0, -0.0),
        "steep": steep[torch.randperm(vocab, generator=rng)],
    }


def random_mask(rng: torch.Generator, vocab: int) -> Tensor:
    words = torch.randint(-(2**31), 2**31, (-(-vocab // 32),), generator=rng).int()
    words[vocab // 64] |= 1 << (vocab // 2 % 31)
    return words


def random_edits(rng: torch.Generator, vocab: int, count: int) -> LogitEdits:
    """Edits of at most `count` distinct tokens. One of them is dropped."""
    ids = torch.randint(0, vocab, (count,), generator=rng).unique()
    factors = 0.5 + torch.rand(len(ids), generator=rng)
    offsets = torch.randn(len(ids), generator=rng) * 3
    offsets[len(ids) // 2] = -math.inf
    return LogitEdits(ids, factors, offsets)


def settings_of(row: int, chain: dict[str, Any], **settings: Any) -> RowSettings:
    return RowSettings(row, **(settings | chain))


def reference_samples(logits: Tensor, rows: Sequence[RowSettings]) -> list[Sampled]:
    """Tokens of the reference backend, which computes in float64."""
    return [ReferenceSamplingOps.sample(logits[row.row], row) for row in rows]


def assert_same(got: Sequence[Sampled], wanted: Sequence[Sampled], hint: object) -> None:
    """Same tokens; probabilities may differ by the rounding of float32 sums."""
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.token_id == other.token_id, (i, one, other, hint)
        assert one.probability == pytest.approx(other.probability, rel=1e-5), (i, hint)
        assert [j for j, _ in one.top] == [j for j, _ in other.top], (i, one, other, hint)
        shares = [p for _, p in other.top]
        assert [p for _, p in one.top] == pytest.approx(shares, rel=1e-5, abs=1e-37), (i, hint)
