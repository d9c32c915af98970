"""The layouts that a matrix may get: widths, mixes of widths, and group sizes.

Those of the format's own converter are among them, and many more mixes. What a mix costs follows
from what each of its rows costs at its width, so that only pure layouts have to be tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from exl_core.convert.plan import GROUP_SIZES, WIDTHS, Layout, Section

ROW_STEP = 32
_NEIGHBORS = ((3, 2), (4, 3), (5, 4), (6, 5), (8, 6))
_NEIGHBOR_SHARES = (5, 10, 15, 25, 30, 40, 50, 60, 75, 90)
_DISTANT = ((4, 2), (5, 2), (6, 2), (5, 3), (6, 3), (8, 3), (6, 4), (8, 4), (8, 5))
_DISTANT_SHARES = (5, 10, 15)
_TRIPLES = ("6:5/32 3:20/64 2:75/64", "6:5/32 3:50/64 2:45/64")
_TOPPED = ((4, 3), (5, 4), (6, 5))  # below 5 per cent of 8 bits
_TOPPED_SHARES = (10, 25, 50)

Costs = Mapping[tuple[int, int], list[float]]
"""By width and group size: what each 32 stored rows cost in a layout of that only."""


@cache
def candidate_layouts() -> tuple[Layout, ...]:
    """All of them, whatever the matrix."""
    found = [Layout((Section(bits, 100, size),)) for bits in WIDTHS for size in GROUP_SIZES]
    for pairs, shares in ((_NEIGHBORS, _NEIGHBOR_SHARES), (_DISTANT, _DISTANT_SHARES)):
        for wide, narrow in pairs:
            for share in shares:
                for size in GROUP_SIZES:
                    sections = Section(wide, share, size), Section(narrow, 100 - share, size)
                    found.append(Layout(sections))
    for narrow in (3, 4, 5, 6):
        found += [Layout.parse(f"8:5/32 {narrow}:95/{size}") for size in (64, 128)]
    for wide, narrow in _TOPPED:
        for share in _TOPPED_SHARES:
            for size in GROUP_SIZES:
                narrow_percent = 95 - share
                found.append(
                    Layout.parse(f"8:5/32 {wide}:{share}/{size} {narrow}:{narrow_percent}/{size}")
                )
    return (*found, *map(Layout.parse, _TRIPLES))


def layouts_for(in_features: int) -> list[Layout]:
    """Those that a matrix can have, and one of each that come to the same groups."""
    different: dict[tuple[tuple[int, int], ...], Layout] = {}
    for layout in candidate_layouts():
        if layout.fits(in_features):
            different.setdefault(tuple(layout.groups(in_features)), layout)
    return list(different.values())


def cost_of(layout: Layout, in_features: int, costs: Costs) -> float:
    """What the rows of a matrix cost together."""
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
