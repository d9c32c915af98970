"""Products of one row's RMSNorm in one launch, against float64 and against two launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda import matmul
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.weights import GroupedColumns, GroupedLayout, GroupRun

pytestmark = pytest.mark.cuda

Calls = list[str]


@pytest.fixture
def rng() -> torch.Generator:
    """A new seed in every run; a failure prints it."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def ops() -> CudaTable:
    table = get_table("cuda", threads=1)
    assert isinstance(table, CudaTable)
    return table


def order_of(rng: torch.Generator, k: int) -> Tensor:
    return torch.randperm(k, generator=rng).int()


def matrix(
    ops: CudaTable, rng: torch.Generator, n: int, features: Tensor, bits: int = 4
) -> tuple[PackedLinear, Tensor]:
    """A random matrix of one or two bit widths, and its weights: float64 [k, n] by feature."""
    k = len(features)
    runs: tuple[GroupRun, ...] = (GroupRun(bits, k // 32, 32),)
    if k > 128:
        runs = GroupRun(bits, 4, 32), GroupRun(4, (k - 128) // 64, 64)
    groups = [run.groups for run in runs]
    codes = torch.randint(0, 2 ** min(bits, 4), (k, n), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(sum(groups), n, generator=rng) * 0.3 / k**0.5).half()
    w = ops.new_linear(GroupedLayout(n, k, runs, features, torch.float16, "middle", False))
    ops.fill_linear(w, 0, GroupedColumns("bytes", codes, scales=scales, offsets=None, bias=None))
    sizes = torch.tensor([run.rows for run in runs]).repeat_interleave(torch.tensor(groups))
    widths = torch.tensor([run.bits for run in runs]).repeat_interleave(torch.tensor(groups))
    of_row = torch.arange(len(sizes)).repeat_interleave(sizes)
    middles = 2.0 ** (widths[of_row].double() - 1)
    stored = (codes.double() - middles[:, None]) * scales.double()[of_row]
    return w, torch.empty_like(stored).index_copy_(0, features.long(), stored)


def normed(x: Tensor, norm: RmsNorm) -> Tensor:
    values = x.cpu().double()
    scale = (values.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return values / scale * norm.weight.cpu().double()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, ops: CudaTable) -> Calls:
    """Names of the library's functions as products call them."""
    names: Calls = []
    call = ops._gpu.call

    def record(name: str, *operands: object) -> None:
        if name != "quant_pack":
            names.append(name)
        call(name, *operands)

    monkeypatch.setattr(ops._gpu, "call", record)
    return names


@pytest.mark.parametrize("k", [64, 128, 192, 2048, 2880, 4096])
@pytest.mark.parametrize("bits", [3, 4, 6])
def test_product_of_a_normed_row(
    ops: CudaTable, rng: torch.Generator, calls: Calls, k: int, bits: int
) -> None:
    features = order_of(rng, k)
    made = [matrix(ops, rng, n, features, bits) for n in (96, 40, 32)]
    joined, weights = ops.join([w for w, _ in made]), torch.cat([w for _, w in made], 1)
    norm = RmsNorm(torch.rand(k, generator=rng).cuda() + 0.5, 1e-5)
    for factor in (1e-3, 1.0, 1e3):
        x = factor * torch.randn(1, k, generator=rng).cuda()
        y = ops.norm_linear(x, norm, joined)
        exact = normed(x, norm) @ weights
        assert float((y.cpu().double() - exact).norm() / exact.norm()) < 2e-3
    assert calls == ["norm_linear"] * 3


@pytest.mark.parametrize("k", [128, 4096])
def test_gated_product_of_a_normed_row(
    ops: CudaTable, rng: torch.Generator, calls: Calls, k: int
) -> None:
    features = order_of(rng, k)
    (gate, gate_weights), (up, up_weights) = (matrix(ops, rng, 96, features) for _ in range(2))
    norm = RmsNorm(torch.rand(k, generator=rng).cuda() + 0.5, 1e-5)
    x = torch.randn(1, k, generator=rng).cuda()
    y = ops.norm_gated_linear(x, norm, ops.join([gate, up]), "silu")
    assert isinstance(y, Tensor)
    h = normed(x, norm)
    exact = torch.nn.functional.silu(h @ gate_weights) * (h @ up_weights)
    assert float((y.cpu().double() - exact).norm() / exact.norm()) < 3e-3
    assert calls == ["norm_linear"]


@pytest.mark.parametrize("k", [4160, 8192])
def test_longer_rows_are_prepared(
    ops: CudaTable, rng: torch.Generator, calls: Calls, k: int
) -> None:
    w, weights = matrix(ops, rng, 64, order_of(rng, k))
    norm = RmsNorm(torch.ones(k).cuda(), 1e-5)
    x = torch.randn(1, k, generator=rng).cuda()
    exact = normed(x, norm) @ weights
    assert float((ops.norm_linear(x, norm, w).cpu().double() - exact).norm()) < 2e-3 * exact.norm()
    assert calls == ["prepare", "quant_linear"]


def test_parts_of_other_permutations_are_prepared(
    ops: CudaTable, rng: torch.Generator, calls: Calls
) -> None:
    made = [matrix(ops, rng, 64, order_of(rng, 256)) for _ in range(2)]
    norm = RmsNorm(torch.ones(256).cuda(), 1e-5)
    x = torch.randn(1, 256, generator=rng).cuda()
    y = ops.norm_linear(x, norm, ops.join([w for w, _ in made]))
    exact = normed(x, norm) @ torch.cat([w for _, w in made], 1)
    assert float((y.cpu().double() - exact).norm()) < 2e-3 * exact.norm()
    assert calls == ["prepare", "quant_linear"]


def test_rows_that_the_previous_kernel_writes(
    ops: CudaTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are resident before the row is written. Every layer reads what the last one added."""
    hidden, inner = 2048, 768
    layers = []
    for _ in range(12):
        features, inner_features = order_of(rng, hidden), order_of(rng, inner)
        wide = ops.join([matrix(ops, rng, inner, features)[0] for _ in range(2)])
        layers.append((wide, matrix(ops, rng, hidden, inner_features)[0]))
    norm = RmsNorm(torch.ones(hidden).cuda(), 1e-5)
    x = torch.zeros(1, hidden).cuda()

    def run() -> None:
        for wide, narrow in layers:
            h = ops.norm_gated_linear(x, norm, wide, "silu")
            assert isinstance(h, Tensor)
            ops.linear_add_(h, narrow, x)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        start = torch.randn(1, hidden, generator=rng).cuda()
        x.copy_(start)
        graph.replay()
        found = x.clone()
        x.copy_(start)
        with monkeypatch.context() as patch:
            patch.setattr(matmul, "row_norm", lambda *_: None)
            run()
        assert float((found - x).norm() / (x - start).norm()) < 2e-3
