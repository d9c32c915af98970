"""What attention and gated products leave for the linear behind them, against inputs prepared for
it: not a bit may differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.backends.cuda.matmul import CudaInputs
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.quantized import GroupRun, QuantColumns, QuantLayout

pytestmark = pytest.mark.cuda

ROWS = (1, 2, 8, 9, 16, 17, 30, 33, 64)
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 256


@pytest.fixture(scope="module")
def ops() -> CudaTable:
    table = get_table("cuda", threads=1)
    assert isinstance(table, CudaTable)
    return table


def matrix(ops: CudaTable, n: int, k: int, seed: int) -> PackedLinear:
    """Random, of two widths, its rows in a random order."""
    rng = torch.Generator().manual_seed(seed)
    runs = (GroupRun(5, 1, 128), GroupRun(4, k // 128 - 1, 128))
    features = torch.randperm(k, generator=rng).int()
    w = ops.new_quantized(QuantLayout(n, k, runs, features, torch.float16, "middle", False))
    codes = torch.randint(0, 16, (k, n), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(k // 128, n, generator=rng) * 0.3 / k**0.5).half()
    columns = QuantColumns("bytes", codes, scales=scales, offsets=None, bias=None)
    ops.fill_quantized(w, 0, columns)
    return w


def times(ops: CudaTable, x: Inputs, w: PackedLinear, rows: int) -> Tensor:
    sums = torch.zeros(rows, w.out_features, device="cuda")
    ops.linear_add_(x, w, sums)
    return sums


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", [256, 1536])
def test_gated_products(ops: CudaTable, rows: int, inner: int) -> None:
    pair = ops.join([matrix(ops, inner, 512, 1), matrix(ops, inner, 512, 2)])
    down = matrix(ops, 96, inner, 3)
    x = torch.randn(rows, 512, device="cuda")
    norm = RmsNorm(torch.rand(512, device="cuda") + 0.5, 1e-5)
    plain = ops.activations(rows, inner)
    ops.norm_gated_linear(x, norm, pair, "silu", plain)
    placed = ops.inputs_for(down, plain)
    if rows <= 8 or torch.cuda.get_device_capability() == (9, 0):
        assert isinstance(placed, CudaInputs)
    if isinstance(placed, CudaInputs):
        placed.memory.fill_(torch.nan)
    ops.norm_gated_linear(x, norm, pair, "silu", placed)
    found = times(ops, placed, down, rows)
    assert torch.equal(found, times(ops, plain, down, rows))
    assert found.abs().amax() > 0


@pytest.mark.parametrize("counts", [(rows,) for rows in ROWS] + [(1, 9, 3), (16, 16), (17, 2, 1)])
def test_attention(ops: CudaTable, counts: tuple[int, ...]) -> None:
    """One number is so many sequences of a row each, several are the rows of each."""
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
    placed = ops.inputs_for(output, plain)
    if isinstance(placed, CudaInputs):
        placed.memory.fill_(torch.nan)
        ops.attend_(qkv, batch, cache, scoring, out=placed)
    found = times(ops, placed, output, rows)
    assert torch.equal(found, times(ops, plain, output, rows))
    assert found.abs().amax() > 0
