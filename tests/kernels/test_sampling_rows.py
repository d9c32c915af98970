"""`sample_rows`: tokens of the float64 reference on every backend, for each row of a batch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.reference.sampling import ReferenceSamplingOps
from exl_core.ops.sampling import NOTHING_SAMPLED, LogitEdits, RowSettings
from exl_core.ops.table import OpTable
from exl_kernels import cuda
from support.sampling_cases import (
    CHAINS,
    assert_same,
    random_edits,
    random_mask,
    reference_samples,
    rows_of,
    settings_of,
)

UNIFORMS = (0.0, 0.31, 0.77, 0.999)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("vocab", [1, 5, 65, 257, 2100, 5003])
def test_every_row_gets_the_token_of_the_reference(
    gpu_table: OpTable, rng: torch.Generator, vocab: int, chain: dict[str, float]
) -> None:
    logits = torch.stack(list(rows_of(rng, vocab).values()))
    settings = []
    for row, uniform in product(range(len(logits)), UNIFORMS):
        mask = random_mask(rng, vocab) if vocab > 1 and row % 2 == 0 else None
        edits = random_edits(rng, vocab, 7) if uniform > 0.5 else None
        settings.append(settings_of(row, chain, uniform=uniform, num_top=4, mask=mask, edits=edits))
    before = logits.clone()

    got = gpu_table.sample_rows(logits, settings)

    assert_same(got, reference_samples(before, settings), chain)
    assert torch.equal(logits, before)
    assert gpu_table.sample_rows(logits, settings) == got


@pytest.mark.parametrize("vocab", [49152, 128256, 262144])
def test_large_vocabularies_with_other_settings_in_each_row(
    gpu_table: OpTable, rng: torch.Generator, vocab: int
) -> None:
    rows = rows_of(rng, vocab)
    logits = torch.stack(list(rows.values()))
    # Rows that no vector load may read at once, with NaN after them.
    wide = torch.full((len(logits), vocab + 7), math.nan)
    wide[:, :vocab] = logits
    mask = random_mask(rng, vocab)
    settings = [
        settings_of(
            row,
            chain,
            uniform=float(torch.rand((), generator=rng, dtype=torch.float64)),
            num_top=i % 4 * 5,
            mask=mask if i % 3 == 0 else None,
        )
        for i, (row, chain) in enumerate(product(range(len(logits)), CHAINS.values()))
    ]
    wanted = reference_samples(logits, settings)
    assert_same(gpu_table.sample_rows(logits, settings), wanted, list(rows))
    assert_same(gpu_table.sample_rows(wide[:, :vocab], settings), wanted, list(rows))


def test_filters_keep_the_documented_tokens(table: OpTable) -> None:
    def kept(row: Tensor, **settings: float) -> list[int]:
        wanted = settings_of(0, settings, num_top=9)
        return [i for i, _ in table.sample_rows(row[None], [wanted])[0].top]

    row = torch.tensor([0.05, 0.40, 0.22, 0.30, 0.03], dtype=torch.float64).log().float()
    assert kept(row) == [1, 3, 2, 0, 4]
    assert kept(row, top_p=0.5) == [1]
    assert kept(row, top_p=0.72) == [1, 3]
    assert kept(row, top_p=0.01) == [1]
    assert kept(row, min_p=0.54) == [1, 3, 2]
    assert kept(row, top_k=2) == [1, 3]
    assert kept(row, top_k=3, top_p=0.5) == [1]
    assert kept(torch.zeros(1000), top_p=0.004) == [0, 1, 2, 3]
    assert kept(torch.zeros(1000), top_k=3) == [0, 1, 2]
    rare = torch.tensor([0.6, 0.4 - 3e-6, 2e-6, 9e-7, 1e-7], dtype=torch.float64).log().float()
    assert kept(rare, top_p=0.9999999) == [0, 1, 2]


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_a_flat_nucleus_ends_by_id(gpu_table: OpTable, share: float) -> None:
    vocab = 100_000
    wanted = RowSettings(0, top_p=share, uniform=1 - 2**-53, num_top=512)
    sampled = gpu_table.sample_rows(torch.zeros(1, vocab), [wanted])[0]
    assert sampled.token_id == math.floor(share * vocab) - 1
    assert [i for i, _ in sampled.top] == list(range(512))


def test_edits_scale_by_sign_and_the_mask_applies_to_edited_tokens(table: OpTable) -> None:
    vocab = 3000
    offsets = torch.arange(600, dtype=torch.float32)
    changes = LogitEdits(torch.arange(600), torch.full((600,), 4.0), offsets)
    row = RowSettings(0, top_k=1, edits=changes)
    logits = torch.zeros(1, vocab)
    assert table.sample_rows(logits, [row])[0].token_id == 599
    logits[0, 599] = -0.5  # becomes 597
    assert table.sample_rows(logits, [row])[0].token_id == 598
    logits[0, 597] = 8.0  # becomes 599
    assert table.sample_rows(logits, [row])[0].token_id == 597
    logits[0, 597] = 0.0
    mask = torch.full((94,), -1, dtype=torch.int32)
    mask[598 // 32] &= ~(1 << 598 % 32)
    assert table.sample_rows(logits, [replace(row, mask=mask)])[0].token_id == 597


def added(token_id: int, value: float) -> LogitEdits:
    return LogitEdits(torch.tensor([token_id]), torch.ones(1), torch.tensor([value]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_with_nan_or_infinity_give_no_token(table: OpTable, value: float) -> None:
    vocab = 2500
    places = (0, 63, 64, 2047, 2048, 2499)
    logits = torch.zeros(len(places) + 1, vocab)
    mask = torch.full((79,), -1, dtype=torch.int32)
    for i, place in enumerate(places):
        logits[i, place] = value
    for chain in CHAINS.values():
        for bits in (None, mask):
            rows = [settings_of(i, chain, num_top=3, mask=bits) for i in range(len(places) + 1)]
            got = table.sample_rows(logits, rows)
            assert got[:-1] == [NOTHING_SAMPLED] * len(places)
            assert got[-1].token_id == 0
            edited = replace(rows[-1], edits=added(70, value))
            assert table.sample_rows(logits, [edited]) == [NOTHING_SAMPLED]


def test_rows_without_a_possible_token_give_none(table: OpTable) -> None:
    impossible = torch.full((1, 700), -math.inf)
    closed = torch.zeros(22, dtype=torch.int32)
    for chain in CHAINS.values():
        row = settings_of(0, chain, num_top=2)
        assert table.sample_rows(impossible, [row]) == [NOTHING_SAMPLED]
        masked = replace(row, mask=closed)
        assert table.sample_rows(torch.zeros(1, 700), [masked]) == [NOTHING_SAMPLED]


@pytest.mark.parametrize("chain", ["plain", "hot", "top-p", "min-p", "usual"])
def test_tokens_are_sampled_with_their_probability(
    gpu_table: OpTable, rng: torch.Generator, chain: str
) -> None:
    vocab, calls, batch = 128256, 40, 250
    logits = torch.randn(vocab, generator=rng) * 3
    settings = settings_of(0, CHAINS[chain])
    classes: Counter[int] = Counter()
    for _ in range(calls):
        uniforms = torch.rand(batch, generator=rng, dtype=torch.float64).tolist()
        rows = [replace(settings, uniform=uniform) for uniform in uniforms]
        sampled = gpu_table.sample_rows(logits[None], rows)
        classes.update(one.token_id * 5 // vocab for one in sampled)
    everything = ReferenceSamplingOps.sample(logits, replace(settings, num_top=vocab)).top
    shares = [0.0] * 5
    for token_id, p in everything:
        shares[token_id * 5 // vocab] += p
    draws = calls * batch
    for i, share in enumerate(shares):
        error = math.sqrt(max(share * (1 - share), 1e-9) / draws)
        assert abs(classes[i] / draws - share) < 5 * error, (i, share, classes)


def test_vocabularies_beyond_the_limit_are_refused(gpu_table: OpTable) -> None:
    with pytest.raises(cuda.CudaError, match="InvalidValue"):
        gpu_table.sample_rows(torch.zeros(1, 262145), [RowSettings(0)])
