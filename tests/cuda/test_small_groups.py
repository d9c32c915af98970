"""GGUF types with groups of 16 stay quantized on a GPU: products, embeddings and dequantization."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from exl_core.formats.codecs.ggml.matrix import columns_of, layout_of
from exl_core.ops.backends.cuda.matmul import CudaInputs
from exl_core.ops.backends.cuda.quantized import CudaQuantLinear
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.elementwise import RmsNorm

pytestmark = pytest.mark.cuda

KINDS = [GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q2_K]
FACTORS_AT = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}
BITS = {"Q6_K": 6.625, "Q3_K": 3.625, "Q2_K": 2.75}
BOUND = 2e-3  # float16 inputs; above 8 rows also float16 weights


def made(
    ops: CudaTable, kind: GGMLQuantizationType, n: int, k: int, seed: int = 0
) -> tuple[CudaQuantLinear, Tensor]:
    """A matrix of random blocks, and its weights, float64 [n, k] on the GPU."""
    rng = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (n, k // 256, size), dtype=np.uint8)
    for at in FACTORS_AT[kind.name]:
        numbers = (rng.uniform(0.2, 1.0, (n, k // 256, 1)) * 1e-3).astype(np.float16)
        blocks[:, :, at : at + 2] = numbers.view(np.uint8)
    raw = blocks.reshape(n, -1)
    layout = layout_of(kind, n, k)
    assert layout is not None
    w = ops.new_linear(layout)
    ops.fill_linear(w, 0, columns_of(torch.from_numpy(raw), kind))
    assert isinstance(w, CudaQuantLinear)
    return w, torch.from_numpy(dequantize(raw, kind)).double().cuda()


def relative(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("n", "k"), [(32, 256), (100, 768), (1024, 2048)])
def test_weights_are_those_of_the_format(
    ops: CudaTable, kind: GGMLQuantizationType, n: int, k: int
) -> None:
    w, exact = made(ops, kind, n, k)
    assert w.size_bytes * 8 <= BITS[kind.name] * k * -(-n // 32) * 32 + 8 * 32 * -(-n // 32)

    ids = torch.arange(n, device="cuda")
    assert torch.equal(ops.embedding(ids, w).double(), exact.float().double())

    dense = torch.full((k, n), torch.nan, dtype=torch.float16, device="cuda")
    w.unpack(0, n, dense)
    torch.testing.assert_close(dense.T.float(), exact.float(), rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16, 17, 33, 64, 90, 150])
@pytest.mark.parametrize(("n", "k"), [(32, 256), (100, 768), (1536, 4096)])
def test_products(ops: CudaTable, kind: GGMLQuantizationType, rows: int, n: int, k: int) -> None:
    w, exact = made(ops, kind, n, k, seed=rows)
    x = torch.randn(rows, k, device="cuda")

    assert relative(ops.linear(x, w), x.double() @ exact.T) < BOUND

    residual = torch.randn(rows, n, device="cuda")
    right = residual.double() + x.double() @ exact.T
    assert relative(ops.linear_add_(x, w, residual), right) < BOUND


@pytest.mark.parametrize("rows", [1, 7, 20, 100])
def test_kinds_are_joined(ops: CudaTable, rows: int) -> None:
    """Queries, keys and values of different types, with inputs in different orders."""
    parts = [made(ops, kind, 160, 512, seed=i) for i, kind in enumerate(KINDS)]
    w = ops.join([part for part, _ in parts])
    x, norm = torch.randn(rows, 512, device="cuda"), RmsNorm(torch.rand(512, device="cuda"), 1e-5)

    found = ops.norm_linear(x, norm, w)

    wide = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight
    exact = torch.cat([wide @ weights.T for _, weights in parts], 1)
    assert relative(found, exact) < BOUND


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gated_products_write_prepared_inputs(
    ops: CudaTable, kind: GGMLQuantizationType, rows: int
) -> None:
    pair = ops.join([made(ops, kind, 512, 512, seed=i)[0] for i in (1, 2)])
    down, _ = made(ops, kind, 96, 512, seed=3)
    x, norm = torch.randn(rows, 512, device="cuda"), RmsNorm(torch.ones(512, device="cuda"), 1e-5)
    plain = ops.activations(rows, 512)
    ops.norm_gated_linear(x, norm, pair, "silu", plain)
    permuted = ops.inputs_for(down, plain)
    assert isinstance(permuted, CudaInputs)
    permuted.memory.fill_(torch.nan)

    ops.norm_gated_linear(x, norm, pair, "silu", permuted)

    found, right = (torch.zeros(rows, 96, device="cuda") for _ in range(2))
    ops.linear_add_(permuted, down, found)
    ops.linear_add_(plain, down, right)
    assert torch.equal(found, right)
