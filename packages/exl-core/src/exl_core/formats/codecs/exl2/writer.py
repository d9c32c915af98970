"""EXL2 writer: packs codes and scales of one linear into the tensors of a file.

Inverse of the unpacking functions of `layout.py`, to the byte. The converter chooses the codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from exl_core.formats.codecs import bits as bitstream
from exl_core.formats.codecs.exl2.layout import (
    COLUMN_STEP,
    ROW_STEP,
    SCALE_BITS,
    WIDTHS,
    Exl2Linear,
    check,
)


def pack(
    codes: Tensor,
    *,
    groups: Sequence[tuple[int, int]],
    scale_codes: Tensor,
    scale_max: Tensor,
    invperm: Tensor,
) -> Exl2Linear:
    """Packs codes [in_features, out_features], integers in the order of the stored rows.

    `groups` are pairs (bits, rows), the widest first. `scale_codes` [groups, out_features] are
    0 .. 15. `scale_max` [groups] is rounded to float16. `invperm` [in_features] is the stored row
    of each feature. Columns are padded to a multiple of 32 with exact zeros.
    """
    _require_input(codes, groups, scale_codes)
    padding = -codes.shape[1] % COLUMN_STEP
    packed, table, row, packed_row = [], [], 0, 0
    for bits, rows in groups:
        zero = 2 ** (bits - 1)
        group_codes = pad(codes[row : row + rows].to(torch.int32), (0, padding), value=zero)
        packed.append(bitstream.pack(group_codes, bits))
        table += [bits, packed_row]
        row, packed_row = row + rows, packed_row + rows * bits // 32
    scales = pad(scale_codes.to(torch.int32), (0, padding), value=0)
    parts = {
        "q_weight": torch.cat(packed),
        "q_scale": bitstream.pack(scales.T, SCALE_BITS).T.contiguous(),
        "q_scale_max": scale_max.to(torch.float16),
        "q_groups": torch.tensor(table, dtype=torch.int16),
        "q_invperm": invperm.to(torch.int32),
    }
    return check(parts, "exl2 writer")


def _require_input(codes: Tensor, groups: Sequence[tuple[int, int]], scale_codes: Tensor) -> None:
    """Checks that would be impossible once the layer is packed."""
    if sum(rows for _, rows in groups) != codes.shape[0]:
        raise ValueError(f"groups {list(groups)} do not cover {codes.shape[0]} rows")
    if scale_codes.shape != (len(groups), codes.shape[1]):
        raise ValueError(f"{len(groups)} groups, but scale codes {tuple(scale_codes.shape)}")
    if int(scale_codes.min()) < 0 or int(scale_codes.max()) >= 1 << SCALE_BITS:
        raise ValueError("a scale code does not fit 4 bits")
    row = 0
    for bits, rows in groups:
        if bits not in WIDTHS or rows < 1 or rows % ROW_STEP:
            raise ValueError(f"no group can have {rows} rows of {bits} bits")
        group = codes[row : row + rows]
        if int(group.min()) < 0 or int(group.max()) >= 1 << bits:
            raise ValueError(f"a code in rows {row} to {row + rows - 1} does not fit {bits} bits")
        row += rows
