"""Sums through the ranks' own memory: several ranks take turns on one GPU, and two on two GPUs.

On one GPU every rank sends before any rank reads, so that nobody waits. The results have the bits of
products, sums in the order of the ranks, and norms that are computed one after the other.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.matmul import CudaInputs
from exl_core.ops.backends.cuda.peers import SharedMemory, buffer_bytes
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.elementwise import LayerNorm, Norm, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.weights import DenseColumns, DenseLayout, GroupedColumns, GroupedLayout, GroupRun
from exl_core.parallel.peers import MAX_RANKS, MAX_ROWS
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64)
ROUNDS = 7  # more than twice the number of stages
UNSENT = -1  # EXL_CUDA_UNSENT as int32


@pytest.fixture(scope="module")
def ops() -> CudaTable:
    table = get_table("cuda", threads=1)
    assert isinstance(table, CudaTable)
    return table


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))


def matrix(ops: CudaTable, n: int, k: int, seed: int) -> PackedLinear:
    """Random matrix of two bit widths with a random permutation."""
    rng = torch.Generator().manual_seed(seed)
    runs = (GroupRun(5, 1, 128), GroupRun(4, k // 128 - 1, 128))
    features = torch.randperm(k, generator=rng).int()
    w = ops.new_linear(GroupedLayout(n, k, runs, features, torch.float16, "middle", False))
    codes = torch.randint(0, 16, (k, n), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(k // 128, n, generator=rng) * 0.3 / k**0.5).half()
    columns = GroupedColumns("bytes", codes, scales=scales, offsets=None, bias=None)
    ops.fill_linear(w, 0, columns)
    return w


class Ranks:
    """The ranks of one GPU, with a buffer each."""

    def __init__(self, ops: CudaTable, number: int, width: int) -> None:
        size = buffer_bytes(number, MAX_ROWS, width)
        self.buffers = [
            torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(number)
        ]
        addresses = [one.data_ptr() for one in self.buffers]
        self.all = [ops.peer_sums(rank, addresses) for rank in range(number)]

    def begin(self, rows: int, width: int) -> None:
        for one in self.all:
            one.begin(rows, width)


def in_order(x: Tensor | None, parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0]) if x is None else x.clone()
    for part in parts:
        total += part
    return total


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_sums_are_formed_in_the_order_of_the_ranks(
    ops: CudaTable, rng: torch.Generator, number: int, rows: int
) -> None:
    width = 32 * (rows % 5 + 1) + 4
    ranks = Ranks(ops, number, width)
    ranks.begin(rows, width)
    for round_ in range(ROUNDS):
        parts = [torch.randn(rows, width, generator=rng).cuda() * 1e3 for _ in range(number)]
        x = torch.randn(rows, width, generator=rng).cuda() if round_ % 2 else None
        for rank, one in enumerate(ranks.all):
            one.send(parts[rank])
        expected = in_order(x, parts)
        for one in ranks.all:
            own = None if x is None else x.clone()
            assert torch.equal(one.await_sum(own, defers=False), expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("width", [128, 1024, 4096])
def test_products_send_their_sums_and_the_next_product_reads_them(
    ops: CudaTable, rng: torch.Generator, *, number: int, rows: int, width: int
) -> None:
    """A deferred sum, alternating between norms and epilogues."""
    ranks = Ranks(ops, number, width)
    rows_in = [matrix(ops, width, 256, seed) for seed in range(number)]
    plain, pair = matrix(ops, 96, width, 50), [matrix(ops, 128, width, seed) for seed in (51, 52)]
    joined = ops.join(pair)
    weight, bias = torch.rand(width, device="cuda") + 0.5, torch.randn(width, device="cuda")
    norms: list[Norm] = [RmsNorm(weight, 1e-5), LayerNorm(weight, bias, 1e-5)]
    x = torch.randn(rows, width, generator=rng).cuda()
    ranks.begin(rows, width)
    for round_ in range(ROUNDS):
        norm = norms[round_ % 2]
        inputs = [torch.randn(rows, 256, generator=rng).half().cuda() for _ in range(number)]
        expected = in_order(x, [ops.linear(h, w) for h, w in zip(inputs, rows_in, strict=True)])
        for one, h, w in zip(ranks.all, inputs, rows_in, strict=True):
            prepared = ops.inputs_for(w, h) if round_ % 2 else h
            if isinstance(prepared, CudaInputs):
                ops._linears.prepare_for(prepared, h)
            assert one.multiply(prepared, w)
        targets = [one.await_sum(x, defers=True) for one in ranks.all]
        for one, target in zip(ranks.all, targets, strict=True):
            if round_ % 3 == 0:
                found = one.norm_linear(target, norm, plain, None)
                assert found is not None
                assert torch.equal(found, ops.norm_linear(expected, norm, plain))
            elif round_ % 3 == 1:
                out, same = ops.activations(rows, 128), ops.activations(rows, 128)
                assert one.norm_gated_linear(target, norm, joined, "silu", out) is out
                assert torch.equal(out, ops.norm_gated_linear(expected, norm, joined, "silu", same))
            else:
                out, same = ops.activations(rows, 96), ops.activations(rows, 96)
                assert one.norm_activated_linear(target, norm, plain, "relu2", out) is out
                other = ops.norm_activated_linear(expected, norm, plain, "relu2", same)
                assert torch.equal(out, other)
            assert torch.equal(target, expected)
        x = targets[0]
    assert x.isfinite().all()


def test_a_read_sum_leaves_its_stage_empty_for_the_next_but_one(ops: CudaTable) -> None:
    rows, width = 5, 64
    ranks = Ranks(ops, 2, width)
    ranks.begin(rows, width)
    stages = [one[: cuda.STAGES * 2 * rows * width].view(cuda.STAGES, -1) for one in ranks.buffers]
    assert all(bool((stage == UNSENT).all()) for stage in stages)
    for number in range(ROUNDS):
        for one in ranks.all:
            one.send(torch.ones(rows, width, device="cuda"))
        for one in ranks.all:
            one.await_sum(None, defers=False)
        for stage in stages:
            is_empty = [bool((part == UNSENT).all()) for part in stage]
            assert is_empty == [place != number % cuda.STAGES for place in range(cuda.STAGES)]


def test_partial_sums_that_are_no_numbers_arrive(ops: CudaTable) -> None:
    """One has the bits that stand for a value that has not arrived."""
    part = torch.tensor([[UNSENT, 0, 0x7F800000, 0x7FC00000]], dtype=torch.int32, device="cuda")
    ranks = Ranks(ops, 2, 4)
    ranks.begin(1, 4)
    for one in ranks.all:
        one.timeout_ms = 200
        one.send(part.view(torch.float32))
    for one in ranks.all:
        found = one.await_sum(None, defers=False)
        assert found.isnan().tolist() == [[True, False, False, True]]
        assert found[0, 2].item() == torch.inf
        assert not one.has_ended


@pytest.mark.parametrize("defers", [False, True])
def test_a_wait_ends_with_its_timeout_or_when_it_is_aborted(ops: CudaTable, defers: bool) -> None:
    width = 256
    norm, w = RmsNorm(torch.ones(width, device="cuda"), 1e-5), matrix(ops, 64, width, 1)
    for is_aborted in (False, True):
        ranks = Ranks(ops, 2, width)
        ranks.begin(2, width)
        first = ranks.all[0]
        first.timeout_ms = 0 if is_aborted else 50
        first.send(torch.ones(2, width, device="cuda"))
        target = first.await_sum(torch.zeros(2, width, device="cuda"), defers=True)
        if is_aborted:
            first.abort()
        if defers:
            first.norm_linear(target, norm, w, None)
        else:
            first.settle()
        torch.cuda.synchronize()
        assert first.has_ended


def test_matrices_without_codes_are_left_to_the_caller(ops: CudaTable) -> None:
    ranks = Ranks(ops, 2, 64)
    ranks.begin(3, 64)
    dense = ops.new_linear(DenseLayout(64, 32, torch.float16, has_bias=False))
    ops.fill_linear(dense, 0, DenseColumns(torch.randn(64, 32).half(), None))
    first = ranks.all[0]
    assert not first.multiply(torch.randn(3, 32).half().cuda(), dense)
    assert not first.multiply(torch.randn(3, 128).half().cuda(), matrix(ops, 32, 128, 1))
    assert not first.takes(torch.zeros(4, 64))


def test_replayed_graphs_exchange_anew(ops: CudaTable, rng: torch.Generator) -> None:
    rows, width = 3, 256
    ranks = Ranks(ops, 2, width)
    parts = [torch.zeros(rows, width, device="cuda") for _ in range(2)]
    x = torch.zeros(rows, width, device="cuda")

    def run() -> Tensor:
        ranks.begin(rows, width)
        results: list[Tensor] = []
        for _ in range(4):
            for one, part in zip(ranks.all, parts, strict=True):
                one.send(part)
            results += [one.await_sum(x, defers=True) for one in ranks.all]
            for one in ranks.all:
                one.settle()
        return torch.stack(results)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        for value in (*parts, x):
            value.copy_(torch.randn(rows, width, generator=rng))
        graph.replay()
        assert all(torch.equal(one, in_order(x, parts)) for one in found)


def test_memory_of_this_process_cannot_be_opened_twice_and_is_freed() -> None:
    memory = SharedMemory(torch.device("cuda", 0), 1 << 20)
    assert memory.address % 256 == 0
    assert len(memory.handle) == cuda.HANDLE_BYTES
    with pytest.raises(cuda.CudaError, match="shared_open"):
        memory.open(memory.handle)
    memory.close()
    memory.close()


def test_exchanges_have_as_many_rows_and_ranks_as_kernels_take() -> None:
    assert MAX_ROWS == cuda.CHUNK_ROWS
    assert MAX_RANKS == cuda.MAX_PEERS + 1
