"""The kernel of latent attention that multiplies few rows by head, and copies beside."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from kernel_support import assert_norm_within, normal
from paged_support import batch_of
from quant_support import Shape, filled, make_matrix
from test_attention_fused import angles, bound_batch, slots_of
from test_latent import DEEPSEEK, MISTRAL4, SCALE, TINY, Sizes, operands, shared
from torch import Tensor

from exl_core.ops.attention import Scoring
from exl_core.ops.backends.cuda.latent import FEW_ROWS, _copy, _products
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.matmul import CudaInputs
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.latent import DenseHeads
from exl_core.ops.table import OpTable

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
    copied = [normal(rng, FEW_ROWS, *shape) for shape in ((heads, 64), (1, 3), (1, 500))]
    gains = 1 + 0.2 * normal(rng, 500)
    norm = RmsNorm(gains.to(gpu.device), 1e-5)
    exact = torch.einsum("mhk,hnk->mhn", x.double(), weight.double())
    first: Tensor | None = None
    for rows in (1, 2, 7, 8, 9, 31, FEW_ROWS):
        y = wider(torch.zeros(rows, heads, n, dtype=torch.float16, device=gpu.device))
        given = wider(x[:rows].to(gpu.device))
        args = _products(given, w, y)
        targets = [wider(torch.zeros_like(one[:rows]).half().to(gpu.device)) for one in copied]
        sources = [wider(one[:rows].to(gpu.device)) for one in copied]
        for i, pair in enumerate(zip(sources, targets, strict=True)):
            args.copies[i] = _copy(*pair, norm if i == 2 else None)
        gpu.call("head_products", args)
        assert_norm_within(y.cpu(), exact[:rows], 5e-4)  # rounding of the results
        for one, to in zip(copied[:2], targets, strict=False):
            assert torch.equal(to.cpu(), one[:rows].half())
        normed = copied[2][:rows].double()
        normed *= (normed.square().mean(2, keepdim=True) + 1e-5).rsqrt() * gains.double()
        assert_norm_within(targets[2].cpu(), normed, 5e-4)
        first = y[:1].clone() if first is None else first
        assert torch.equal(y[:1], first), "a row's bits do not depend on the others"


@pytest.mark.parametrize("sizes", [TINY, MISTRAL4, DEEPSEEK], ids=["tiny", "mistral4", "deepseek"])
@pytest.mark.parametrize("permuted", [False, True])
def test_results_are_stored_as_inputs_of_the_next_matrix(
    gpu_table: OpTable, rng: torch.Generator, *, sizes: Sizes, permuted: bool
) -> None:
    """With a norm of the latent vectors before."""
    k = sizes.heads * sizes.value
    shape = Shape(((4, k // 40, 32), (4, 1, k - k // 40 * 32)), 96, permuted=permuted)
    w = filled(gpu_table, make_matrix(rng, shape))
    norm = RmsNorm(1 + 0.2 * normal(rng, sizes.rank), 1e-5)
    for sequences in ([(17, 1)], [(40, 1)] * 5, [(9, 1)] * 8, [(3, 4), (20, 1)] * 4, [(2, 1)] * 32):
        batch = batch_of(rng, "f16", sequences, (1, sizes.rotated + sizes.rank, 16))
        rotation = angles(rng, batch.rows, sizes.rotated // 2)
        given, cache = operands(gpu_table, rng, batch.rows, sizes), shared(batch)
        bound = bound_batch(gpu_table, batch, slots_of(batch), *rotation)
        attend = partial(
            cast(Any, gpu_table).attend_latent, batch=bound, cache=cache, scoring=Scoring(SCALE)
        )
        h = attend(*given, norm=norm)
        normed = given._replace(latent=gpu_table.rms_norm(given.latent, norm))
        assert_norm_within(attend(*normed), h.double(), 3e-3)
        inputs = attend(*given, norm=norm, to=w)
        assert isinstance(inputs, CudaInputs) == (k % 32 == 0), "or rows are padding"
        got = gpu_table.linear_add_(inputs, w, torch.zeros(batch.rows, 96))
        assert_norm_within(got, gpu_table.linear(h, w).double(), 1e-6)
