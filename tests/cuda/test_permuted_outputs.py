"""Attention and products with an activation that write prepared inputs of the next linear.

The next product has the same bits as with separately prepared inputs.
"""

from __future__ import annotations

import pytest
import torch
from cuda_support import matrix
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.backends.cuda.matmul import CudaInputs
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.elementwise import LayerNorm, RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear

pytestmark = pytest.mark.cuda

ROWS = (1, 2, 8, 9, 16, 17, 30, 33, 64)
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 256


def product(ops: CudaTable, x: Inputs, w: PackedLinear, rows: int) -> Tensor:
    sums = torch.zeros(rows, w.out_features, device="cuda")
    ops.linear_add_(x, w, sums)
    return sums


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", [256, 1536])
def test_gated_products_write_prepared_inputs(ops: CudaTable, rows: int, inner: int) -> None:
    pair = ops.join([matrix(ops, inner, 512, 1), matrix(ops, inner, 512, 2)])
    down = matrix(ops, 96, inner, 3)
    x = torch.randn(rows, 512, device="cuda")
    norm = RmsNorm(torch.rand(512, device="cuda") + 0.5, 1e-5)
    plain = ops.activations(rows, inner)
    ops.norm_gated_linear(x, norm, pair, "silu", plain)
    permuted = ops.inputs_for(down, plain)
    if rows <= 8 or torch.cuda.get_device_capability() == (9, 0):
        assert isinstance(permuted, CudaInputs)
    if isinstance(permuted, CudaInputs):
        permuted.memory.fill_(torch.nan)
    ops.norm_gated_linear(x, norm, pair, "silu", permuted)
    found = product(ops, permuted, down, rows)
    assert torch.equal(found, product(ops, plain, down, rows))
    assert found.abs().amax() > 0


@pytest.mark.parametrize("rows", [*ROWS, 100])
@pytest.mark.parametrize("inner", [256, 1536])
def test_activated_products_write_prepared_inputs(ops: CudaTable, rows: int, inner: int) -> None:
    up, down = matrix(ops, inner, 512, 1), matrix(ops, 96, inner, 3)
    x = torch.randn(rows, 512, device="cuda") + 3
    weight, bias = torch.rand(512, device="cuda") + 0.5, torch.randn(512, device="cuda")
    norm = LayerNorm(weight, bias, 1e-5)
    plain = ops.activations(rows, inner)
    ops.norm_activated_linear(x, norm, up, "gelu_tanh", plain)
    permuted = ops.inputs_for(down, plain)
    if isinstance(permuted, CudaInputs):
        permuted.memory.fill_(torch.nan)
    ops.norm_activated_linear(x, norm, up, "gelu_tanh", permuted)
    found = product(ops, permuted, down, rows)
    assert torch.equal(found, product(ops, plain, down, rows))
    normed = torch.nn.functional.layer_norm(x, (512,), weight, bias, 1e-5)
    right = torch.nn.functional.gelu(ops.linear(normed, up), approximate="tanh")
    error = (plain.float() - right).norm() / right.norm()
    assert float(error) < 2e-3


@pytest.mark.parametrize("counts", [(rows,) for rows in ROWS] + [(1, 9, 3), (16, 16), (17, 2, 1)])
def test_attention_writes_prepared_inputs(ops: CudaTable, counts: tuple[int, ...]) -> None:
    """`counts` are the rows of each sequence; a single number is a number of one-row sequences."""
    counts = (1,) * counts[0] if len(counts) == 1 else counts
    rows, width = sum(counts), (HEADS + 2 * KV_HEADS) * DIM
    pasts = torch.arange(5, 5 + 3 * len(counts), 3).int()
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    at = [(i, int(pasts[i]) + j) for i, count in enumerate(counts) for j in range(count)]
    batch = ops.attention_batch(
        AttentionRows(torch.arange(len(counts)).int()[:, None], starts, pasts),
        torch.tensor([page * PAGE + place for page, place in at]),
        torch.ones(rows, DIM // 2),
        torch.zeros(rows, DIM // 2),
        num_pages=len(counts),
        page_size=PAGE,
    )
    shape = (2, len(counts), KV_HEADS, PAGE, DIM)
    cache = CacheLayer(*torch.randn(shape, device="cuda").half())
    output = matrix(ops, 160, HEADS * DIM, 4)
    qkv = torch.randn(rows, width, device="cuda").half()
    scoring = Scoring(DIM**-0.5)
    in_place = qkv.clone()
    ops.attend_(in_place, batch, cache, scoring)
    plain = in_place[:, : HEADS * DIM]
    permuted = ops.inputs_for(output, plain)
    if isinstance(permuted, CudaInputs):
        permuted.memory.fill_(torch.nan)
        ops.attend_(qkv, batch, cache, scoring, out=permuted)
    found = product(ops, permuted, output, rows)
    assert torch.equal(found, product(ops, plain, output, rows))
    assert found.abs().amax() > 0
