"""The kernel of latent attention that multiplies few rows by head, and copies beside."""

from __future__ import annotations

import pytest
import torch
from kernel_support import assert_norm_within, normal
from torch import Tensor

from exl_core.ops.backends.cuda.latent import FEW_ROWS, _copy, _products
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.latent import DenseHeads

pytestmark = pytest.mark.cuda

SIZES = [(1, 4, 1), (3, 36, 33), (16, 512, 128), (16, 128, 512), (5, 192, 512), (2, 40, 1024)]
"""Heads, n, k."""


def wider(x: Tensor) -> Tensor:
    """The same values, in rows and heads that are farther apart than their length."""
    memory = torch.full((x.shape[0], x.shape[1] + 2, x.shape[2] + 5), torch.nan, device=x.device)
    view = memory.to(x.dtype)[:, 1:-1, 3:-2]
    return view.copy_(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "n", "k"), SIZES)
def test_products_and_copies(
    rng: torch.Generator, heads: int, n: int, k: int, dtype: torch.dtype
) -> None:
    gpu = Gpu(torch.device("cuda", 0))
    weight = (normal(rng, heads, n, k) / k**0.5).half()
    w = DenseHeads(weight.to(gpu.device).transpose(1, 2).contiguous().transpose(1, 2))
    x = normal(rng, FEW_ROWS, heads, k).to(dtype)
    copied = [normal(rng, FEW_ROWS, *shape) for shape in ((heads, 64), (1, 3), (1, 700))]
    exact = torch.einsum("mhk,hnk->mhn", x.double(), weight.double())
    first: Tensor | None = None
    for rows in (1, 2, 7, 8, 9, 31, FEW_ROWS):
        y = wider(torch.zeros(rows, heads, n, dtype=torch.float16, device=gpu.device))
        args = _products(wider(x[:rows].to(gpu.device)), w, y)
        targets = [wider(torch.zeros_like(one[:rows]).half().to(gpu.device)) for one in copied]
        sources = [wider(one[:rows].to(gpu.device)) for one in copied]
        for i, pair in enumerate(zip(sources, targets, strict=True)):
            args.copies[i] = _copy(*pair)
        gpu.call("head_products", args)
        assert_norm_within(y.cpu(), exact[:rows], 5e-4)  # rounding of the results
        for one, to in zip(copied, targets, strict=True):
            assert torch.equal(to.cpu(), one[:rows].half())
        first = y[:1].clone() if first is None else first
        assert torch.equal(y[:1], first), "a row's bits do not depend on the others"
