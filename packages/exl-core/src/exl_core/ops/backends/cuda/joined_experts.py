"""A shared expert as further experts of a layer, so that one row takes no launches for it.

The tables of the experts get entries for its matrices, which stay where they are. A shared expert
that is several times as wide as an expert is divided: columns of gate and up, rows of down. It is
not joined if the kernels would lose something that all experts have in common, such as one table of
loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exl_core.ops.backends.cuda.experts import CudaExperts, Part, grouped, loads_of
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.matmul import CudaLinear
from exl_core.ops.backends.cuda.quantized import PANEL_COLUMNS, CudaQuantLinear
from exl_kernels import cuda

Pair = tuple[CudaExperts, CudaExperts]
"""Gate and up, or up, of all experts, and down."""


def join(
    pair: Pair, wide: Sequence[object], narrow: Sequence[object], gpu: Gpu
) -> tuple[CudaExperts, CudaExperts, int] | None:
    """The pair with a shared expert after the others, and the number of parts it is divided into.

    wide, narrow   parts of its gate_up and down
    """
    gate_up, down = pair
    found, last = grouped([tuple(wide)]), grouped([tuple(narrow)])
    if found is None or last is None:
        return None
    count = last[0][0].in_features // down.in_features
    if count < 1 or gate_up.num_experts + count > cuda.MAX_EXPERTS:
        return None
    likes = gate_up.matrices[0], down.matrices[0]
    added_wide = [_columns(found[0], likes[0], i, count) for i in range(count)]
    added_narrow = [_rows(last[0], likes[1], i, count) for i in range(count)]
    joined = []
    for old, added in ((gate_up, added_wide), (down, added_narrow)):
        each = [parts for parts in added if parts is not None]
        every = grouped([*old.matrices, *each])
        if len(each) < count or every is None:
            return None
        new = CudaExperts.of(every, gpu, shared=count)
        if old.halves is None and _common(new) != _common(old):
            return None
        if old.halves is not None and new.halves is None:
            return None
        joined.append(new)
    return joined[0], joined[1], count


def _common(experts: CudaExperts) -> tuple[object, ...]:
    """Properties by which kernels are chosen."""
    return (
        *(experts.parts, experts.source, experts.is_plain, experts.has_inverses),
        *(experts.has_common_order, experts.has_one_order),
        experts.common_loads is None,
    )


def _columns(
    parts: tuple[Part, ...], likes: tuple[Part, ...], index: int, count: int
) -> tuple[Part, ...] | None:
    """Columns of each part of gate and up, as many as an expert has."""
    if count == 1:
        return parts
    found: list[Part] = []
    for w, like in zip(parts, likes, strict=False):
        first, columns = index * like.out_features, like.out_features
        if w.out_features != count * columns:
            return None
        if isinstance(w, CudaLinear):
            bias = None if w.bias is None else w.bias[first : first + columns]
            found.append(CudaLinear(w.weight[first : first + columns], bias))
        elif isinstance(like, CudaQuantLinear) and w.plan_key == like.plan_key:
            if first % PANEL_COLUMNS != 0 or w.permutation is not like.permutation:
                return None
            offset = first // PANEL_COLUMNS * w.matrix.panel_bytes
            found.append(w.part(like, offset, first_column=first))
        else:
            return None
    return tuple(found) if len(found) == len(parts) == len(likes) else None


def _rows(
    parts: tuple[Part, ...], likes: tuple[Part, ...], index: int, count: int
) -> tuple[Part, ...] | None:
    """Rows of down, as many as an expert has, if their loads are those of an expert."""
    if count == 1:
        return parts
    (w,), like = parts, likes[0]
    if not isinstance(w, CudaQuantLinear) or not isinstance(like, CudaQuantLinear):
        return None
    is_plain = all(one.layout.features is None and not one.layout.factor_rows for one in (w, like))
    if not is_plain or w.bias is not None or w.in_features != count * like.in_features:
        return None
    loads, wanted = loads_of(w.plan_key), loads_of(like.plan_key)
    own = loads[index * len(wanted) : (index + 1) * len(wanted)].copy()
    if len(loads) != count * len(wanted):
        return None
    offset = int(own["offset"][0]) - int(wanted["offset"][0])
    own["offset"] -= np.uint32(offset)
    own["first_block"] -= np.uint16(index * like.num_blocks)
    return (w.part(like, offset),) if (own == wanted).all() else None
