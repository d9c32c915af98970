"""Candidate layouts of a matrix: widths, mixes of widths, and group sizes.

They include all layouts of exllamav2's converter and many more mixes. The cost of a mix is the sum
of the costs of its rows at their widths. Only layouts of a single width have to be measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from exl_core.convert.plan import (
    GROUP_SIZES,
    WIDTHS,
    AnyLayout,
    Layout,
    Section,
    TrellisCodes,
)

ROW_STEP = 32
_NEIGHBORS = ((3, 2), (4, 3), (5, 4), (6, 5), (8, 6))
_NEIGHBOR_SHARES = (5, 10, 15, 25, 30, 40, 50, 60, 75, 90)
_DISTANT = ((4, 2), (5, 2), (6, 2), (5, 3), (6, 3), (8, 3), (6, 4), (8, 4), (8, 5))
_DISTANT_SHARES = (5, 10, 15)
_TRIPLES = ("6:5/32 3:20/64 2:75/64", "6:5/32 3:50/64 2:45/64")
_TOPPED = ((4, 3), (5, 4), (6, 5))  # preceded by 5 per cent of 8 bits
_TOPPED_SHARES = (10, 25, 50)

Costs = Mapping[tuple[int, int] | TrellisCodes, list[float]]
"""Expected losses of a matrix. EXL2: of each block of 32 stored rows in a layout of one section, by
width and group size. EXL3: of the whole matrix, by layout."""


@cache
def candidate_layouts() -> tuple[Layout, ...]:
    """All candidate layouts, for matrices of any size."""
    layouts = [Layout((Section(bits, 100, size),)) for bits in WIDTHS for size in GROUP_SIZES]
    for pairs, shares in ((_NEIGHBORS, _NEIGHBOR_SHARES), (_DISTANT, _DISTANT_SHARES)):
        for wide, narrow in pairs:
            for share in shares:
                for size in GROUP_SIZES:
                    sections = Section(wide, share, size), Section(narrow, 100 - share, size)
                    layouts.append(Layout(sections))
    for narrow in (3, 4, 5, 6):
        layouts += [Layout.parse(f"8:5/32 {narrow}:95/{size}") for size in (64, 128)]
    for wide, narrow in _TOPPED:
        for share in _TOPPED_SHARES:
            for size in GROUP_SIZES:
                narrow_percent = 95 - share
                layouts.append(
                    Layout.parse(f"8:5/32 {wide}:{share}/{size} {narrow}:{narrow_percent}/{size}")
                )
    return (*layouts, *map(Layout.parse, _TRIPLES))


def layouts_for(in_features: int) -> list[Layout]:
    """Candidates that a matrix can store; of several with the same groups, the first."""
    different: dict[tuple[tuple[int, int], ...], Layout] = {}
    for layout in candidate_layouts():
        if layout.fits(in_features):
            different.setdefault(tuple(layout.groups(in_features)), layout)
    return list(different.values())


def cost_of(layout: AnyLayout, in_features: int, costs: Costs) -> float:
    """Sum of the costs of a matrix's rows in one layout."""
    if isinstance(layout, TrellisCodes):
        return sum(costs[layout])
    total, block = 0.0, 0
    groups = iter(layout.groups(in_features))
    remaining = in_features
    for section in layout.sections:
        hundredths = min(in_features * section.percent, remaining * 100)
        for _ in range(-(-hundredths // (100 * section.group_size))):
            rows = next(groups)[1]
            remaining -= rows
            count = rows // ROW_STEP
            total += sum(costs[section.bits, section.group_size][block : block + count])
            block += count
    return total
