"""Norms, rotations, gates and embeddings on the GPU against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 130]
DIMS = [32, 100, 576, 1536, 11008]
TYPE_PAIRS = [(F32, F32), (F32, F16), (F16, F32), (F16, F16)]
EPS = 1e-6


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(torch.device("cuda", 0))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Of float16 outputs the rounding, of float32 ones what float32 sums lose."""
    assert bool(got.isfinite().all())
    bound = 5e-4 if got.dtype is F16 else 2e-6
    assert (got.double().cpu() - exact).norm() <= bound * exact.norm()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    values = x.double()
    return values / (values.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def poisoned(gpu: Gpu, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=gpu.device)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("types", TYPE_PAIRS, ids=str)
def test_rms_norm(
    gpu: Gpu, rng: torch.Generator, types: tuple[torch.dtype, torch.dtype], rows: int, d: int
) -> None:
    wide = torch.randn(rows, d + 24, generator=rng).to(types[0])
    weight = torch.randn(d, generator=rng)
    x, on_gpu = wide.to(gpu.device)[:, :d], weight.to(gpu.device)
    out = poisoned(gpu, rows, d, dtype=types[1])
    source = x.data_ptr(), TYPES[types[0]], x.stride(0), on_gpu.data_ptr(), EPS, rows, d
    gpu.call("rms_norm", *source, out.data_ptr(), TYPES[types[1]], d)
    exact = normed(wide[:, :d], weight)
    assert_near(out, exact)
    if types[0] == types[1]:
        gpu.call("rms_norm", *source, x.data_ptr(), TYPES[types[0]], x.stride(0))
        assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("rows, heads, d", [(1, 1, 64), (3, 32, 128), (130, 5, 80), (17, 9, 256)])
def test_rms_norm_heads(
    *, gpu: Gpu, rng: torch.Generator, dtype: torch.dtype, rows: int, heads: int, d: int
) -> None:
    wide = torch.randn(rows, heads * d + 16, generator=rng).to(dtype)
    weight = torch.randn(d, generator=rng)
    x, on_gpu = wide.to(gpu.device), weight.to(gpu.device)
    operands = x.data_ptr(), TYPES[dtype], x.stride(0), on_gpu.data_ptr(), EPS, rows, heads, d
    gpu.call("rms_norm_heads", *operands)
    exact = normed(wide[:, : heads * d].reshape(rows, heads, d), weight)
    assert_near(x[:, : heads * d].reshape(rows, heads, d), exact)
    assert torch.equal(x[:, heads * d :].cpu(), wide[:, heads * d :])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("rows, heads", [(1, 1), (3, 33), (130, 8)])
def test_rope(
    *, gpu: Gpu, rng: torch.Generator, dtype: torch.dtype, half: int, rows: int, heads: int
) -> None:
    d = 64
    wide = torch.randn(rows, heads * d + 8, generator=rng).to(dtype)
    angles = torch.rand(rows, half, generator=rng) * 100
    cos, sin, x = angles.cos().to(gpu.device), angles.sin().to(gpu.device), wide.to(gpu.device)
    turned = x.data_ptr(), TYPES[dtype], x.stride(0), cos.data_ptr(), sin.data_ptr(), half
    gpu.call("rope", *turned, rows, heads, d)
    exact = wide.double()[:, : heads * d].reshape(rows, heads, d)
    first, second = exact[..., :half].clone(), exact[..., half : 2 * half].clone()
    c, s = angles.cos().double()[:, None], angles.sin().double()[:, None]
    exact[..., :half] = first * c - second * s
    exact[..., half : 2 * half] = second * c + first * s
    assert_near(x[:, : heads * d].reshape(rows, heads, d), exact)
    assert torch.equal(x[:, heads * d :].cpu(), wide[:, heads * d :])


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("types", TYPE_PAIRS, ids=str)
@pytest.mark.parametrize("rows, d", [(1, 8), (2, 100), (7, 1), (33, 1536), (130, 11008)])
def test_gated_activation(
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
    out = poisoned(gpu, rows, d, dtype=types[1])
    source = x.data_ptr(), TYPES[types[0]], x.stride(0), cuda.GATES[gate]
    gpu.call("gated_activation", *source, rows, d, out.data_ptr(), TYPES[types[1]], d)
    gates, ups = wide.double()[:, :d], wide.double()[:, d : 2 * d]
    if gate == "silu":
        exact = torch.nn.functional.silu(gates) * ups
    else:
        exact = torch.nn.functional.gelu(gates, approximate="tanh") * ups
    assert_near(out, exact)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_far_from_zero(gpu: Gpu, gate: str) -> None:
    x = torch.tensor([[-1e4, -100.0, -88.0, 88.0, 100.0, 1e4] + [1.0] * 6], device=gpu.device)
    out = poisoned(gpu, 1, 6, dtype=F32)
    gates = x.data_ptr(), TYPES[F32], 12, cuda.GATES[gate]
    gpu.call("gated_activation", *gates, 1, 6, out.data_ptr(), TYPES[F32], 6)
    assert out.cpu()[0, :3].abs().max() < 1e-30
    assert torch.equal(out.cpu()[0, 3:], torch.tensor([88.0, 100.0, 1e4]))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("k", [32, 100, 576, 11008])
@pytest.mark.parametrize("rows", [1, 33])
def test_embedding(gpu: Gpu, rng: torch.Generator, dtype: torch.dtype, rows: int, k: int) -> None:
    weight = torch.randn(50, k, generator=rng).to(dtype)
    ids = torch.randint(50, (rows,), generator=rng)
    table, on_gpu = weight.to(gpu.device), ids.to(gpu.device)
    y = poisoned(gpu, rows, k, dtype=F32)
    gpu.call("embedding", table.data_ptr(), TYPES[dtype], on_gpu.data_ptr(), rows, k, y.data_ptr())
    assert torch.equal(y.cpu(), weight[ids].float())
