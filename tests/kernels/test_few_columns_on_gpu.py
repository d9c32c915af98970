"""Products with float16 matrices of few columns: the router's kernel computes few rows of them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from kernel_support import assert_norm_within, normal, packed

from exl_core.ops.backends.cuda.dense import FEW_COLUMNS, FEW_ROWS
from exl_core.ops.backends.cuda.matmul import CudaLinear
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.table import OpTable

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 2048), (7, 100), (64, 2048), (FEW_COLUMNS, 96), (33, 30)])
def test_few_columns(
    gpu_table: OpTable, rng: torch.Generator, n: int, k: int, dtype: torch.dtype, *, has_norm: bool
) -> None:
    """Several parts, with and without a bias, of strided inputs, into the columns of one output."""
    table = cast(Any, gpu_table).on_device
    weights = [(normal(rng, columns, k) / k**0.5).half() for columns in (n, 3)]
    bias = normal(rng, n)
    joined = table.join([packed(gpu_table, weights[0], bias), packed(gpu_table, weights[1])])
    assert all(isinstance(part, CudaLinear) for part in joined.parts)
    gains = 1 + 0.2 * normal(rng, k)
    norm = RmsNorm(gains.to(table.device), 1e-5)
    for rows in (1, 2, 5, 8, 9, 33, FEW_ROWS, FEW_ROWS + 1):
        wide = 2 * normal(rng, rows, k + 8).to(dtype)
        x = wide.to(table.device)[:, :k]
        h = wide[:, :k].double()
        if has_norm:
            h = h * (h.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gains.double()
        exact = torch.cat([h @ w.double().T for w in weights], 1)
        exact[:, :n] += bias.double()
        got = (table.norm_linear(x, norm, joined) if has_norm else table.linear(x, joined)).cpu()
        is_exact = rows <= FEW_ROWS  # neither inputs nor weights are rounded
        assert_norm_within(got, exact, 1e-6 if is_exact else 2e-3)
