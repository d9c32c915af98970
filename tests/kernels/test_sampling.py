"""`sample` and log-sum-exp: compiled kernels sample the same tokens as the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from kernel_support import UNIT, assert_within, normal, strided_rows
from torch import Tensor

from exl_core.ops.open import available_isas, get_table
from exl_core.ops.sampling import NOTHING_SAMPLED, LogitEdits, RowSettings, SampleSettings
from exl_core.ops.table import OpTable
from support.profiles import first_by_default
from support.sampling_cases import CHAINS, assert_same, random_edits, random_mask, rows_of

UNIFORMS = (0.0, 0.31, 0.77, 0.999, 1 - 1e-9)
REFERENCE = get_table("reference", threads=1)
# Later sets share the kernel of avx512.
KERNELS = {isa: get_table("cpu", isa=isa, threads=1) for isa in available_isas()[:3]}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("vocab", first_by_default([65, 2100, 1, 5, 257], 2))
def test_kernels_sample_the_tokens_of_the_reference(
    rng: torch.Generator, vocab: int, chain: dict[str, float]
) -> None:
    for (name, logits), is_masked in product(rows_of(rng, vocab).items(), (False, True)):
        mask = random_mask(rng, vocab) if is_masked and vocab > 1 else None
        changes = random_edits(rng, vocab, 7)
        for uniform in UNIFORMS[:: 1 if vocab < 300 else 2]:
            settings = dict(chain, uniform=uniform, num_top=4 if vocab > 5 else 10)
            for edits in (None, changes):
                whole = SampleSettings(mask=mask, edits=edits, **settings)  # type: ignore[arg-type]
                before = logits.clone()
                wanted = REFERENCE.sample(logits, whole)
                for isa, kernels in KERNELS.items():
                    got = kernels.sample(logits, whole)
                    assert_same([got], [wanted], (isa, name, uniform, is_masked))
                assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [49152, 262144])
@pytest.mark.parametrize("name", ["broad", "peaked", "levels", "dropped"])
def test_large_vocabularies(rng: torch.Generator, vocab: int, name: str) -> None:
    logits = rows_of(rng, vocab)[name]
    mask = random_mask(rng, vocab)
    for chain, uniform in zip(
        ("plain", "top-k", "wide top-k", "top-p", "wide", "usual"), (0.3, 0.9) * 3, strict=True
    ):
        settings = SampleSettings(
            mask=mask,
            uniform=uniform,
            num_top=3,
            **CHAINS[chain],  # type: ignore[arg-type]
        )
        wanted = REFERENCE.sample(logits, settings)
        for isa, kernels in KERNELS.items():
            got = kernels.sample(logits, settings)
            assert_same([got], [wanted], (isa, chain))


def test_filters_keep_the_documented_tokens(cpu_table: OpTable) -> None:
    logits = torch.tensor([0.05, 0.40, 0.22, 0.30, 0.03], dtype=torch.float64).log().float()

    def kept(row: Tensor = logits, **settings: float) -> list[int]:
        whole = SampleSettings(num_top=9, **settings)  # type: ignore[arg-type]
        return [i for i, _ in cpu_table.sample(row, whole).top]

    assert kept() == [1, 3, 2, 0, 4]
    assert kept(top_p=0.5) == [1]
    assert kept(top_p=0.72) == [1, 3]
    assert kept(top_p=0.01) == [1]
    assert kept(min_p=0.54) == [1, 3, 2]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=3, top_p=0.5) == [1]
    assert kept(torch.zeros(1000), top_p=0.004) == [0, 1, 2, 3]
    assert kept(torch.zeros(1000), top_k=3) == [0, 1, 2]
    rare = torch.tensor([0.6, 0.4 - 3e-6, 2e-6, 9e-7, 1e-7], dtype=torch.float64).log().float()
    assert kept(rare, top_p=0.9999999) == [0, 1, 2]


def test_uniform_numbers_select_tokens_by_id(cpu_table: OpTable) -> None:
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log()
    uniforms = (0.0, 0.2499, 0.2501, 0.74, 0.76, 1 - 2**-53)
    sampled = [cpu_table.sample(logits, SampleSettings(uniform=u)) for u in uniforms]
    assert [d.token_id for d in sampled] == [0, 0, 2, 2, 3, 3]
    assert [d.probability for d in sampled] == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])


def test_edits_scale_by_sign_and_the_mask_applies_to_edited_tokens(cpu_table: OpTable) -> None:
    logits = torch.tensor([2.0, -2.0, -1.9])
    halved = LogitEdits(torch.tensor([1, 0]), torch.tensor([2.0, 2.0]), torch.zeros(2))
    edited = SampleSettings(edits=halved, num_top=3)  # 1, -4, -1.9
    assert [i for i, _ in cpu_table.sample(logits, edited).top] == [0, 2, 1]
    raised = LogitEdits(torch.tensor([1, 0]), torch.ones(2), torch.tensor([7.0, 1.0]))
    edited = SampleSettings(edits=raised, top_k=1)
    assert cpu_table.sample(logits, edited).token_id == 1
    mask = torch.tensor([0b101], dtype=torch.int32)
    assert cpu_table.sample(logits, replace(edited, mask=mask)).token_id == 0
    longer = torch.tensor([0b100, -1], dtype=torch.int32)
    assert cpu_table.sample(logits, SampleSettings(mask=longer, top_k=1)).token_id == 2


@pytest.mark.parametrize("place", [0, 63, 64, 299])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.5}])
def test_rows_with_nan_or_infinity_give_no_token(
    cpu_table: OpTable, place: int, value: float, settings: dict[str, Any]
) -> None:
    logits = torch.zeros(300)
    logits[place] = value
    assert cpu_table.sample(logits, SampleSettings(**settings)) == NOTHING_SAMPLED
    mask = torch.full((10,), -1, dtype=torch.int32)
    mask[place // 32] = 0
    masked = SampleSettings(mask=mask, **settings)
    assert cpu_table.sample(logits, masked) == NOTHING_SAMPLED
    changes = LogitEdits(torch.tensor([place]), torch.ones(1), torch.tensor([value]))
    edited = SampleSettings(edits=changes, **settings)
    assert cpu_table.sample(torch.zeros(300), edited) == NOTHING_SAMPLED


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.5}])
def test_rows_without_a_possible_token_give_none(
    cpu_table: OpTable, settings: dict[str, Any]
) -> None:
    nothing = torch.full((70,), -math.inf)
    assert cpu_table.sample(nothing, SampleSettings(**settings)) == NOTHING_SAMPLED
    closed = torch.zeros(3, dtype=torch.int32)
    masked = SampleSettings(mask=closed, **settings)
    assert cpu_table.sample(torch.zeros(70), masked) == NOTHING_SAMPLED


def test_each_row_is_sampled_with_its_own_settings(
    cpu_table: OpTable, rng: torch.Generator
) -> None:
    vocab = 300
    wide = torch.stack([*rows_of(rng, vocab + 5).values(), torch.full((vocab + 5,), math.nan)])
    logits = wide[:, :vocab]  # strided
    settings = []
    for i, chain in enumerate(CHAINS.values()):
        one = RowSettings(i * 7 % len(wide), uniform=0.06 * i, num_top=i % 3)
        if i % 2:
            one = replace(one, mask=random_mask(rng, vocab))
        if i % 4 > 1:
            one = replace(one, edits=random_edits(rng, vocab, 9))
        settings.append(replace(one, **chain))  # type: ignore[arg-type]
    sampled = cpu_table.sample_rows(logits, settings)
    for one, got in zip(settings, sampled, strict=True):
        assert got == cpu_table.sample(logits[one.row], one)
    assert NOTHING_SAMPLED in sampled
    assert cpu_table.sample_rows(logits, []) == []


@pytest.mark.parametrize("rows", [1, 3, 33, 130])
@pytest.mark.parametrize("n", first_by_default([1, 7, 33, 100, 1025, 49152], 5))
@pytest.mark.parametrize("spread", [0.01, 4.0, 100.0])
def test_log_sum_exp_matches_float64(
    table: OpTable, rng: torch.Generator, rows: int, n: int, spread: float
) -> None:
    x = spread * strided_rows(rng, rows, n) + 30

    y = table.log_sum_exp(x)

    exact = x.double().logsumexp(1)
    # Each term and each run of a sum is rounded, and so is the difference to the largest value.
    assert_within(y, exact, 40 * UNIT + 2 * UNIT * exact.abs())


@pytest.mark.parametrize("n", [1, 16, 40, 3000])
def test_log_sum_exp_at_the_edges(table: OpTable, rng: torch.Generator, n: int) -> None:
    x = normal(rng, 5, n)
    x[0, n - 1], x[1, 0], x[2, n // 2] = torch.nan, torch.nan, torch.inf
    x[3] = -torch.inf
    assert table.log_sum_exp(x).isnan().tolist() == [True, True, True, True, False]
    x[4, 0] = 1e30
    x[4, 1:] = -torch.inf
    assert table.log_sum_exp(x)[4] == torch.tensor(1e30)


def test_log_sum_exp_refuses_empty_rows(cpu_table: OpTable) -> None:
    with pytest.raises(ValueError, match="log_sum_exp: x"):
        cpu_table.log_sum_exp(torch.zeros(2, 0))


F, Z, L = torch.zeros(40), torch.zeros(2), torch.arange(2)


@pytest.mark.parametrize(
    ("logits", "settings", "names"),
    [
        (torch.zeros(0), {}, "logits"),
        (F.double(), {}, "logits"),
        (torch.zeros(2, 4), {}, "logits"),
        (torch.zeros(8)[::2], {}, "logits"),
        (F, {"mask": torch.zeros(1, dtype=torch.int32)}, "mask"),
        (F, {"mask": torch.zeros(2)}, "mask"),
        (F, {"edits": LogitEdits(L.int(), Z + 1, Z)}, "ids"),
        (F, {"edits": LogitEdits(L + 39, Z + 1, Z)}, "ids"),
        (F, {"edits": LogitEdits(L - 1, Z + 1, Z)}, "ids"),
        (F, {"edits": LogitEdits(L, torch.ones(3), Z)}, "factors"),
        (F, {"edits": LogitEdits(L, Z, Z)}, "factors"),
        (F, {"edits": LogitEdits(L, Z + torch.nan, Z)}, "factors"),
        (F, {"edits": LogitEdits(L, Z + 1, torch.zeros(3))}, "offsets"),
        *((F, {"temperature": t}, "") for t in (0.0, -1.0, math.nan)),
        *((F, {"top_p": p}, "") for p in (0.0, 1.1, math.nan)),
        *((F, {"min_p": p}, "") for p in (-0.1, 1.1, math.nan)),
        *((F, {"uniform": u}, "") for u in (-0.1, 1.0, math.nan)),
        (F, {"top_k": -1}, ""),
        (F, {"num_top": -1}, ""),
    ],
)
def test_operands_that_break_the_contract_are_refused(
    cpu_table: OpTable, logits: Tensor, settings: dict[str, Any], names: str
) -> None:
    with pytest.raises(ValueError, match=f"sample: .*{names}"):
        cpu_table.sample(logits, SampleSettings(**settings))
