"""Allocation against all possible ones, and sizes of layouts against exllamav2's counting."""

from __future__ import annotations

import itertools
import random

import pytest

from exl_core.convert.allocate import allocate
from exl_core.convert.candidates import Costs, candidate_layouts, cost_of, layouts_for
from exl_core.convert.plan import (
    HEAD_LAYOUTS,
    Candidate,
    LayerMeasurement,
    Layout,
    MatrixMeasurement,
)
from exl_core.errors import RequestError

# Distinct parameter sets of the tables in exllamav2's converter.
REFERENCE = (
    *("3:5/64 2:95/64", "3:10/64 2:90/64", "3:25/64 2:75/64", "4:10/128 3:90/128"),
    *("4:10/64 3:90/64", "4:100/128", "4:100/64", "4:100/32", "5:10/128 4:90/128"),
    *("5:10/64 4:90/64", "5:10/32 4:90/32", "5:100/64", "5:100/32", "6:10/128 5:90/128"),
    *("6:10/32 5:90/32", "6:100/128", "6:100/32", "8:100/32", "8:100/128", "3:30/64 2:70/64"),
    *("6:5/32 3:20/64 2:75/64", "5:5/32 3:95/32", "5:5/32 4:95/32", "4:25/128 3:75/128"),
    *("4:10/32 3:90/32", "4:25/32 3:75/32", "8:5/32 4:10/128 3:85/128"),
    *("8:5/32 4:10/32 3:85/32", "8:5/32 4:95/128", "8:5/32 4:95/32", "5:25/128 4:75/128"),
    *("5:25/32 4:75/32", "8:5/32 5:10/128 4:85/128", "8:5/32 5:10/32 4:85/32"),
    *("6:25/128 5:75/128", "6:25/32 5:75/32", "8:5/32 6:10/128 5:85/128"),
    *("8:5/32 6:10/32 5:85/32", "8:5/32 6:95/128", "8:10/128 6:90/128", "8:15/128 6:85/128"),
)


def measurement(rng: random.Random, matrices: int, candidates: int) -> LayerMeasurement:
    def matrix(number: int) -> MatrixMeasurement:
        size = rng.choice([1000, 3000])
        found = []
        for bits in sorted(rng.sample(range(1800, 9000), candidates)):
            error = rng.uniform(0.5, 1.5) * 4.0 ** (-bits / 1000)
            found.append(Candidate("4:100/64", bits * size // 1000, error))
        return MatrixMeasurement(f"m{number}.weight", size, tuple(found))

    return LayerMeasurement(0, tuple(matrix(number) for number in range(matrices)))


@pytest.mark.parametrize("seed", range(12))
def test_allocation_is_optimal_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    layer = measurement(rng, matrices=5, candidates=6)
    bits = rng.uniform(3.0, 8.0)
    found = allocate([layer], bits)
    best = min(
        sum(c.error for c in picked)
        for picked in itertools.product(*(m.candidates for m in layer.matrices))
        if sum(c.bits for c in picked) <= found.budget_bits
    )
    assert found.bits <= found.budget_bits == int(bits * found.numel)
    assert found.error == pytest.approx(best, rel=1e-12)


def test_error_falls_with_the_budget_which_is_used_up() -> None:
    layers = [measurement(random.Random(3), matrices=40, candidates=20)]
    errors = [allocate(layers, bits).error for bits in (2.5, 3.0, 4.0, 5.0, 6.0, 20.0)]
    assert errors == sorted(errors, reverse=True)
    found = allocate(layers, 4.0)
    assert found.bits > 0.999 * found.budget_bits
    assert allocate(layers, 20.0).error == pytest.approx(
        sum(min(c.error for c in m.candidates) for m in layers[0].matrices)
    )
    assert allocate(layers, 4.0) == found


def test_too_few_bits_are_refused_with_the_minimum() -> None:
    with pytest.raises(RequestError, match=r"at least 1\.95"):
        layer = MatrixMeasurement("w.weight", 100, (Candidate("2:100/64", 195, 1.0),))
        allocate([LayerMeasurement(0, (layer,))], 1.0)


def test_candidates_include_exllamav2_parameter_sets() -> None:
    known = {str(layout) for layout in candidate_layouts()}
    assert not set(REFERENCE) - known


@pytest.mark.parametrize(
    ("text", "in_features", "groups"),
    [
        ("4:100/128", 576, [(4, 128)] * 4 + [(4, 64)]),
        ("3:10/64 2:90/64", 576, [(3, 64)] + [(2, 64)] * 8),
        ("8:5/32 4:10/128 3:85/128", 608, [(8, 32), (4, 128), *[(3, 128)] * 3, (3, 64)]),
        ("6:10/128 5:90/128", 96, [(6, 96)]),
    ],
)
def test_layout_groups_match_the_format(
    text: str, in_features: int, groups: list[tuple[int, int]]
) -> None:
    layout = Layout.parse(text)
    assert layout.groups(in_features) == groups
    assert str(layout) == text


def test_cost_bits_match_exllamav2() -> None:
    # 576 x 192 at 4 bits: codes, scales and table entries of 5 groups, row order, and a bias.
    plain = 576 * 192 * 4 + 5 * (16 + 32 + 4 * 192) + 32 * 576
    assert Layout.parse("4:100/128").cost_bits(576, 192) == plain
    assert Layout.parse("4:100/128").cost_bits(576, 192, has_bias=True) == plain + 16 * 192
    assert Layout.parse("4:100/128").cost_bits(576, 180) == plain  # padded to 192
    assert all(Layout.parse(text) for text in HEAD_LAYOUTS.values())


@pytest.mark.parametrize("text", ["3:50/64 4:50/64", "4:90/64", "7:100/64", "4:100/48", "4", ""])
def test_invalid_layouts_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="layout"):
        Layout.parse(text)


def test_cost_of_mixed_layout_is_sum_of_row_costs() -> None:
    costs: Costs = {(bits, 64): [10.0 * bits + block for block in range(6)] for bits in (2, 3)}
    layout = Layout.parse("3:25/64 2:75/64")  # one group of 3 bits, two of 2
    assert layout.groups(192) == [(3, 64), (2, 64), (2, 64)]
    assert cost_of(layout, 192, costs) == 30 + 31 + 22 + 23 + 24 + 25


def test_candidate_layouts_are_distinct_and_fit_the_group_table() -> None:
    for in_features in (64, 576, 14336):
        layouts = layouts_for(in_features)
        tables = [tuple(layout.groups(in_features)) for layout in layouts]
        assert len(set(tables)) == len(tables)
        assert all(sum(rows for _, rows in table) == in_features for table in tables)
        for table in tables:
            assert sum(bits * rows for bits, rows in table[:-1]) // 32 <= 32767
