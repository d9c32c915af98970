"""Products with float16 matrices: by torch, as they are or in chunks of a fixed number of rows, and
by the router's kernel for few rows and columns, where a launch takes longer than the product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import FIXED_ROWS, TYPES, Gpu
from exl_core.ops.elementwise import Norm, RmsNorm
from exl_core.ops.linear import DenseLinear
from exl_kernels import cuda

FEW_ROWS, FEW_COLUMNS = 64, 256
"""Most rows and columns of `multiply_few`: its kernel computes each number by one warp."""


def are_few(x: Tensor, matrices: Sequence[DenseLinear], norm: Norm | None, out: Tensor) -> bool:
    """Whether `multiply_few` takes these products."""
    is_known = norm is None or isinstance(norm, RmsNorm)
    is_known = is_known and out.dtype is torch.float32 and x.dtype in (torch.float32, torch.float16)
    return is_known and len(x) <= FEW_ROWS and all(w.out_features <= FEW_COLUMNS for w in matrices)


def multiply_few(
    gpu: Gpu, x: Tensor, norm: Norm | None, each: Iterable[tuple[object, Tensor]]
) -> None:
    """y [m, n] float32 = norm(x) [m, k] @ w + bias, for each w and its y. x is not rounded."""
    for w, y in each:
        if len(x):
            gpu.call("route", _few(x, norm, cast(DenseLinear, w), y))


def _few(x: Tensor, norm: Norm | None, w: DenseLinear, out: Tensor) -> cuda.Route:
    args = cuda.Route(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        x_dtype=TYPES[x.dtype],
        weight=w.weight.data_ptr(),
        logit_bias=None if w.bias is None else w.bias.data_ptr(),
        logits=out.data_ptr(),
        logits_stride=out.stride(0),
        m=len(x),
        d=x.shape[1],
        experts=w.out_features,
        top_k=1,
        groups=1,
        kept_groups=1,
        group_scores=1,
    )
    if norm is not None:
        args.norm, args.norm_eps = norm.weight.data_ptr(), norm.eps
    return args


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
