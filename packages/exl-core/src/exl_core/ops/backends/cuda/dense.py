"""Products with float16 matrices by torch, as they are or in chunks of a fixed number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import FIXED_ROWS


def add_product(x: Tensor, weight: Tensor, out: Tensor, is_added: bool) -> None:
    """out = x [m, k] @ weight [k, n], or += if `is_added`; accumulates in float32."""
    if is_added:
        torch.addmm(out, x, weight, out_dtype=torch.float32, out=out)
    elif out.dtype is torch.float16:
        torch.mm(x, weight, out=out)
    else:  # into the columns of `out` directly, which mm does not do for another type
        torch.addmm(out, x, weight, beta=0, out_dtype=torch.float32, out=out)


def add_fixed_product(x: Tensor, weight: Tensor, out: Tensor, is_added: bool) -> None:
    """The same as `add_product`, in chunks of exactly `FIXED_ROWS` rows."""
    chunks = torch.split(x, FIXED_ROWS), torch.split(out, FIXED_ROWS)
    for rows, sums in zip(*chunks, strict=True):
        padded = x.new_zeros(FIXED_ROWS, x.shape[1])
        padded[: rows.shape[0]] = rows
        product = torch.mm(padded, weight, out_dtype=torch.float32)[: rows.shape[0]]
        if is_added:
            sums.add_(product)
        else:
            sums.copy_(product)
