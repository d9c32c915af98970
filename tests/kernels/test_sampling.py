"""Drawing a token: the kernels take the very tokens that the sorted reference takes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from exl_core.ops.open import available_isas, get_table
from exl_core.ops.sampling import NOTHING_SAMPLED, RowSettings, Sampled
from exl_core.ops.table import OpTable
from support.profiles import first_by_default

REFERENCE = get_table("reference", threads=1)
# The sets beyond avx512 have its kernel.
KERNELS = {isa: get_table("cpu", isa=isa, threads=1) for isa in available_isas()[:3]}
UNIFORMS = (0.0, 0.31, 0.77, 0.999, 1 - 1e-9)

CHAINS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.01},
    "hot": {"temperature": 100.0, "top_p": 0.9},
    "greedy": {"top_k": 1},
    "top-k": {"top_k": 40},
    "wide top-k": {"top_k": 700, "temperature": 0.7},
    "all of top-k": {"top_k": 10**12, "top_p": 0.5},
    "top-p": {"top_p": 0.95},
    "narrow": {"top_p": 1e-9},
    "wide": {"top_p": 0.999999},
    "min-p": {"min_p": 0.05},
    "only the best": {"min_p": 1.0},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top-p, min-p": {"temperature": 1.3, "top_p": 0.7, "min_p": 0.3},
}


def rows(rng: torch.Generator, vocab: int) -> dict[str, Tensor]:
    noise = torch.randn(vocab, generator=rng)
    peaked = noise - 8
    peaked[torch.randperm(vocab, generator=rng)[:30]] += 9
    dropped = noise.clone()
    dropped[torch.rand(vocab, generator=rng) < 0.7] = -math.inf
    dropped[vocab // 2] = 0.5
    return {
        "flat": torch.zeros(vocab),
        "narrow": noise * 0.02 + 50,
        "broad": noise * 3,
        "sharp": noise * 30 - 1000,
        "peaked": peaked,
        "levels": (noise * 4).round() / 4,
        "dropped": dropped,
        "signed zeros": torch.where(noise > 0, 0.0, -0.0),
    }


def random_mask(rng: torch.Generator, vocab: int) -> Tensor:
    words = torch.randint(-(2**31), 2**31, (-(-vocab // 32),), generator=rng).int()
    words[vocab // 64] |= 1 << (vocab // 2 % 31)
    return words


def assert_same(got: Sampled, wanted: Sampled, hint: object) -> None:
    """Tokens exactly; probabilities but for the rounding of float32 sums."""
    assert got.token_id == wanted.token_id, hint
    assert math.isclose(got.probability, wanted.probability, rel_tol=1e-5), hint
    assert [i for i, _ in got.top] == [i for i, _ in wanted.top], hint
    for (_, p), (_, q) in zip(got.top, wanted.top, strict=True):
        assert math.isclose(p, q, rel_tol=1e-5), hint


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("vocab", first_by_default([65, 2100, 1, 5, 257], 2))
def test_kernels_draw_what_the_reference_draws(
    rng: torch.Generator, vocab: int, chain: dict[str, float]
) -> None:
    for (name, logits), is_masked in product(rows(rng, vocab).items(), (False, True)):
        mask = random_mask(rng, vocab) if is_masked and vocab > 1 else None
        ids = torch.randint(0, vocab, (7,), generator=rng)
        values = torch.randn(7, generator=rng) * 3
        values[3] = -math.inf
        for uniform in UNIFORMS[:: 1 if vocab < 300 else 2]:
            settings = dict(chain, uniform=uniform, num_top=4 if vocab > 5 else 10)
            plain = (logits, mask, None, None)
            for operands in (plain, (logits, mask, ids, values)):
                before = logits.clone()
                wanted = REFERENCE.sample(*operands, **settings)  # type: ignore[arg-type]
                for isa, kernels in KERNELS.items():
                    got = kernels.sample(*operands, **settings)  # type: ignore[arg-type]
                    assert_same(got, wanted, (isa, name, uniform, is_masked))
                assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [49152, 262144])
@pytest.mark.parametrize("name", ["broad", "peaked", "levels", "dropped"])
def test_large_vocabularies(rng: torch.Generator, vocab: int, name: str) -> None:
    logits = rows(rng, vocab)[name]
    mask = random_mask(rng, vocab)
    for chain, uniform in zip(
        ("plain", "top-k", "wide top-k", "top-p", "wide", "usual"), (0.3, 0.9) * 3, strict=True
    ):
        settings = dict(CHAINS[chain], uniform=uniform, num_top=3)
        wanted = REFERENCE.sample(logits, mask, **settings)  # type: ignore[arg-type]
        for isa, kernels in KERNELS.items():
            got = kernels.sample(logits, mask, **settings)  # type: ignore[arg-type]
            assert_same(got, wanted, (isa, chain))


def test_the_tokens_at_the_borders_are_the_documented_ones(table: OpTable) -> None:
    logits = torch.tensor([0.05, 0.40, 0.22, 0.30, 0.03], dtype=torch.float64).log().float()

    def kept(row: Tensor = logits, **settings: float) -> list[int]:
        return [i for i, _ in table.sample(row, num_top=9, **settings).top]  # type: ignore[arg-type]

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


def test_numbers_fall_to_tokens_by_id(table: OpTable) -> None:
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log()
    drawn = [table.sample(logits, uniform=u) for u in (0.0, 0.2499, 0.2501, 0.74, 0.76, 1 - 2**-53)]
    assert [d.token_id for d in drawn] == [0, 0, 2, 2, 3, 3]
    assert [d.probability for d in drawn] == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])


def test_the_last_of_equal_ids_counts_and_the_mask_is_above_changes(table: OpTable) -> None:
    ids = torch.tensor([2, 0, 2, 1])
    values = torch.tensor([9.0, 1.0, -9.0, 5.0])
    assert table.sample(torch.zeros(3), None, ids, values, top_k=1).token_id == 1
    mask = torch.tensor([0b101], dtype=torch.int32)
    assert table.sample(torch.zeros(3), mask, ids, values, top_k=1).token_id == 0
    longer = torch.tensor([0b100, -1], dtype=torch.int32)
    assert table.sample(torch.zeros(3), longer, top_k=1).token_id == 2


@pytest.mark.parametrize("place", [0, 63, 64, 299])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.5}])
def test_what_is_no_number_is_not_drawn_from(
    table: OpTable, place: int, value: float, settings: dict[str, int]
) -> None:
    logits = torch.zeros(300)
    logits[place] = value
    assert table.sample(logits, **settings) == NOTHING_SAMPLED
    mask = torch.full((10,), -1, dtype=torch.int32)
    mask[place // 32] = 0
    assert table.sample(logits, mask, **settings) == NOTHING_SAMPLED
    changed = table.sample(torch.zeros(300), None, torch.tensor([place]), torch.tensor([value]))
    assert changed == NOTHING_SAMPLED


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.5}])
def test_without_a_token_nothing_is_drawn(table: OpTable, settings: dict[str, int]) -> None:
    nothing = torch.full((70,), -math.inf)
    assert table.sample(nothing, **settings) == NOTHING_SAMPLED
    closed = torch.zeros(3, dtype=torch.int32)
    assert table.sample(torch.zeros(70), closed, **settings) == NOTHING_SAMPLED


def test_rows_are_drawn_each_by_its_own_settings(table: OpTable, rng: torch.Generator) -> None:
    vocab = 300
    wide = torch.stack([*rows(rng, vocab + 5).values(), torch.full((vocab + 5,), math.nan)])
    logits = wide[:, :vocab]  # strided
    settings = []
    for i, chain in enumerate(CHAINS.values()):
        one = RowSettings(i * 5 % len(wide), uniform=0.06 * i, num_top=i % 3)
        if i % 2:
            one = one._replace(mask=random_mask(rng, vocab))
        if i % 4 > 1:
            ids = torch.randint(0, vocab, (9,), generator=rng)
            one = one._replace(ids=ids, values=torch.randn(9, generator=rng) * 4)
        settings.append(one._replace(**chain))  # type: ignore[arg-type]
    drawn = table.sample_rows(logits, settings)
    for one, got in zip(settings, drawn, strict=True):
        operands = one._asdict()
        row = logits[operands.pop("row")]
        assert got == table.sample(row, **operands)
    assert NOTHING_SAMPLED in drawn
    assert table.sample_rows(logits, []) == []


F, L = torch.zeros(40), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("operands", "settings", "names"),
    [
        ((torch.zeros(0),), {}, "logits"),
        ((F.double(),), {}, "logits"),
        ((torch.zeros(2, 4),), {}, "logits"),
        ((torch.zeros(8)[::2],), {}, "logits"),
        ((F, torch.zeros(1, dtype=torch.int32)), {}, "mask"),
        ((F, torch.zeros(2)), {}, "mask"),
        ((F, None, L.int(), torch.zeros(2)), {}, "ids"),
        ((F, None, L + 40, torch.zeros(2)), {}, "ids"),
        ((F, None, L - 1, torch.zeros(2)), {}, "ids"),
        ((F, None, L, torch.zeros(3)), {}, "values"),
        ((F, None, None, torch.zeros(3)), {}, "values"),
        *(((F,), {"temperature": t}, "") for t in (0.0, -1.0, math.nan)),
        *(((F,), {"top_p": p}, "") for p in (0.0, 1.1, math.nan)),
        *(((F,), {"min_p": p}, "") for p in (-0.1, 1.1, math.nan)),
        *(((F,), {"uniform": u}, "") for u in (-0.1, 1.0, math.nan)),
        ((F,), {"top_k": -1}, ""),
        ((F,), {"num_top": -1}, ""),
    ],
)
def test_operands_that_break_the_contract_are_refused(
    table: OpTable, operands, settings, names
) -> None:
    with pytest.raises(ValueError, match=f"sample: .*{names}"):
        table.sample(*operands, **settings)
