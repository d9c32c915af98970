"""Operand types of C functions that the op table does not use, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 130]
EPS = 1e-6
TYPE_PAIRS = [(F32, F32), (F32, F16), (F16, F32), (F16, F16)]  # of inputs and results


def assert_near(got: Tensor, exact: Tensor) -> None:
    assert bool(got.isfinite().all())
    bound = 5e-4 if got.dtype is F16 else 2e-6
    assert (got.double().cpu() - exact).norm() <= bound * exact.norm()


def unwritten(gpu: Gpu, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=gpu.device)


@pytest.mark.parametrize("d", [32, 100, 576, 1536, 11008])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("types", TYPE_PAIRS, ids=str)
def test_rms_norm_of_all_types_and_in_place(
    gpu: Gpu, rng: torch.Generator, types: tuple[torch.dtype, torch.dtype], rows: int, d: int
) -> None:
    wide, weight = (
        torch.randn(rows, d + 24, generator=rng).to(types[0]),
        torch.randn(d, generator=rng),
    )
    x, on_gpu = wide.to(gpu.device)[:, :d], weight.to(gpu.device)
    out = unwritten(gpu, rows, d, dtype=types[1])
    source = x.data_ptr(), TYPES[types[0]], x.stride(0), on_gpu.data_ptr(), EPS, rows, d
    gpu.call("rms_norm", *source, out.data_ptr(), TYPES[types[1]], d)
    exact = torch.nn.functional.rms_norm(wide[:, :d].double(), (d,), weight.double(), EPS)
    assert_near(out, exact)
    if types[0] == types[1]:
        gpu.call("rms_norm", *source, x.data_ptr(), TYPES[types[0]], x.stride(0))
        assert torch.equal(x, out)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("types", TYPE_PAIRS, ids=str)
@pytest.mark.parametrize(("rows", "d"), [(1, 8), (2, 100), (7, 1), (33, 1536), (130, 11008)])
def test_gated_activation_of_all_types(
    *,
    gpu: Gpu,
    rng: torch.Generator,
    gate: str,
    types: tuple[torch.dtype, torch.dtype],
    rows: int,
    d: int,
) -> None:
    wide = (torch.randn(rows, 2 * d + 8, generator=rng) * 4).to(types[0])
    x = wide.to(gpu.device)[:, : 2 * d]
    out = unwritten(gpu, rows, d, dtype=types[1])
    source = x.data_ptr(), TYPES[types[0]], x.stride(0), cuda.GATES[gate]
    gpu.call("gated_activation", *source, rows, d, out.data_ptr(), TYPES[types[1]], d)
    gates, ups = wide.double()[:, :d], wide.double()[:, d : 2 * d]
    if gate == "silu":
        exact = torch.nn.functional.silu(gates) * ups
    else:
        exact = torch.nn.functional.gelu(gates, approximate="tanh") * ups
    assert_near(out, exact)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("k", [32, 100, 576, 11008])
@pytest.mark.parametrize("rows", [1, 33])
def test_embedding_of_all_types(
    gpu: Gpu, rng: torch.Generator, dtype: torch.dtype, rows: int, k: int
) -> None:
    weight = torch.randn(50, k, generator=rng).to(dtype)
    ids = torch.randint(50, (rows,), generator=rng)
    table, on_gpu = weight.to(gpu.device), ids.to(gpu.device)
    y = unwritten(gpu, rows, k, dtype=F32)
    gpu.call("embedding", table.data_ptr(), TYPES[dtype], on_gpu.data_ptr(), rows, k, y.data_ptr())
    assert torch.equal(y.cpu(), weight[ids].float())
