"""Sums through the ranks' own memory: several ranks take turns on one GPU, or each has its own.

On one GPU every rank sends before any rank reads, so that no rank waits. The results have the bits
of products, sums in the order of the ranks, and norms that are computed one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from cuda_support import matrix
from torch import Tensor

from exl_core.ops.backends.cuda.matmul import CudaInputs
from exl_core.ops.backends.cuda.peers import LargeSums, SharedMemory, _Pending
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.backends.cuda.trellis import PENDING_ROWS
from exl_core.ops.elementwise import LayerNorm, Norm, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.weights import DenseColumns, DenseLayout
from exl_core.parallel.peers import MAX_RANKS, MAX_ROWS
from exl_kernels import cuda
from exl_kernels.cuda_exchange import HANDLE_BYTES, MAX_PEERS, PACKET_VALUES, STAGES
from support.peer_ranks import ROUNDS, ROWS, UNSENT, Ranks, connected_tables, in_order, trellis

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_sums_are_formed_in_the_order_of_the_ranks(
    ops: CudaTable, rng: torch.Generator, number: int, rows: int
) -> None:
    width = 32 * (rows % 5 + 1) + 4
    ranks = Ranks(ops, number, width)
    ranks.begin(rows)
    for round_ in range(ROUNDS):
        parts = [torch.randn(rows, width, generator=rng).cuda() * 1e3 for _ in range(number)]
        x = torch.randn(rows, width, generator=rng).cuda() if round_ % 2 else None
        for rank, one in enumerate(ranks.all):
            one.send(parts[rank])
        expected = in_order(x, parts)
        for one in ranks.all:
            own = None if x is None else x.clone()
            assert torch.equal(one.await_sum(own, defers=False), expected)
    ranks.end()


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
    ranks.begin(rows)
    for round_ in range(ROUNDS):
        norm = norms[round_ % 2]
        inputs = [torch.randn(rows, 256, generator=rng).half().cuda() for _ in range(number)]
        expected = in_order(x, [ops.linear(h, w) for h, w in zip(inputs, rows_in, strict=True)])
        for one, h, w in zip(ranks.all, inputs, rows_in, strict=True):
            prepared = ops.inputs_for(w, h) if round_ % 2 else h
            if isinstance(prepared, CudaInputs):
                ops._linears.prepare_for(prepared, h)
            assert one.multiply(prepared, w, defers=True)
        targets = [one.await_sum(x, defers=True) for one in ranks.all]
        for one, target in zip(ranks.all, targets, strict=True):
            if round_ % 3 == 0:
                found = one.norm_linear(target, norm, plain, None)
                assert found is not None
                assert torch.equal(found, ops.norm_linear(expected, norm, plain))
            elif round_ % 3 == 1:
                out, same = ops.activations(rows, 128), ops.activations(rows, 128)
                assert one.norm_gated_linear(target, norm, joined, "silu", out) is out
                ops.norm_gated_linear(expected, norm, joined, "silu", same)
                assert torch.equal(out, same)
            else:
                out, same = ops.activations(rows, 96), ops.activations(rows, 96)
                assert one.norm_activated_linear(target, norm, plain, "relu2", out) is out
                ops.norm_activated_linear(expected, norm, plain, "relu2", same)
                assert torch.equal(out, same)
            assert torch.equal(target, expected)
        x = targets[0]
    assert x.isfinite().all()
    ranks.end()


@pytest.fixture(autouse=True)
def first_gpu_afterwards() -> Iterator[None]:
    """Opening the table of another GPU makes that the current one of the thread."""
    yield
    torch.cuda.set_device(0)


@pytest.mark.parametrize("make", [matrix, trellis], ids=["groups", "trellis"])
@pytest.mark.parametrize("number", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_ranks_with_their_own_gpus_wait_for_each_other(
    rng: torch.Generator, make: Callable[..., PackedLinear], number: int, rows: int
) -> None:
    """The GPUs send and read at the same time, and pause at random. Products read most sums."""
    width, rounds = 1024, 40
    tables = connected_tables(number)
    ranks = Ranks(tables, number, width)
    sending = [make(table, width, 256, seed) for seed, table in enumerate(tables)]
    reading = [make(table, 96, width, 50) for table in tables]
    norms = [RmsNorm(torch.ones(width, device=table.device), 1e-5) for table in tables]
    inputs = torch.randn(rounds, number, rows, 256, generator=rng).half()
    pauses = torch.randint(0, 100_000, (rounds, number), generator=rng).tolist()
    own = [inputs[:, rank].to(table.device) for rank, table in enumerate(tables)]
    states = [torch.zeros(rows, width, device=table.device) for table in tables]
    found: list[list[tuple[Tensor, Tensor]]] = []
    for one in ranks.all:
        one.timeout_ms, one.is_alone = 10_000, True
    for table in tables:
        torch.cuda.synchronize(table.device)  # all buffers are empty
    ranks.begin(rows)
    for round_ in range(rounds):
        defers, is_read = round_ % 5 != 4, round_ % 7 != 6
        for rank, one in enumerate(ranks.all):
            with torch.cuda.device(rank):
                torch.cuda._sleep(pauses[round_][rank])  # type: ignore[no-untyped-call]
            assert one.multiply(own[rank][round_], sending[rank], defers=defers)
        found.append([])
        for rank, one in enumerate(ranks.all):
            before = states[rank] if defers else states[rank].clone()  # which may be overwritten
            states[rank] = one.await_sum(before, defers=defers)
            y = None
            if defers and is_read:
                y = one.norm_linear(states[rank], norms[rank], reading[rank], None)
                assert y is not None or (make is trellis and rows > PENDING_ROWS)
            one.settle()
            if y is None:
                y = tables[rank].norm_linear(states[rank], norms[rank], reading[rank])
            found[-1].append((states[rank], y))
    ranks.end()
    assert not any(one.has_ended for one in ranks.all)
    expected = torch.zeros(rows, width)
    for round_ in range(rounds):
        parts = [
            table.linear(own[rank][round_], sending[rank]).cpu()
            for rank, table in enumerate(tables)
        ]
        expected = in_order(expected, parts)
        y = tables[0].norm_linear(expected.to(tables[0].device), norms[0], reading[0]).cpu()
        for state, out in found[round_]:
            assert torch.equal(state.cpu(), expected)
            assert torch.equal(out.cpu(), y)


def test_sums_that_a_product_has_read_are_emptied_by_the_next_reader(ops: CudaTable) -> None:
    rows, width = 5, 256
    norm, w = RmsNorm(torch.ones(width, device="cuda"), 1e-5), matrix(ops, 64, width, 1)
    ranks = Ranks(ops, 2, width)
    x = torch.zeros(rows, width, device="cuda")
    size = 2 * rows * width
    for length in (1, 2, 3, 5):
        ranks.begin(rows)
        for number in range(length):
            for one in ranks.all:
                one.send(torch.ones(rows, width, device="cuda"))
            for one in ranks.all:
                one.norm_linear(one.await_sum(x, defers=True), norm, w, None)
            for buffer in ranks.buffers:
                starts = [stage * 2 * MAX_ROWS * width for stage in range(STAGES)]
                is_empty = [bool((buffer[at : at + size] == UNSENT).all()) for at in starts]
                assert is_empty == [stage != number % STAGES for stage in range(STAGES)]
        ranks.end()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_embeddings_and_logits_are_shared(
    ops: CudaTable, rng: torch.Generator, number: int, rows: int
) -> None:
    """In passes of other sizes, one after the other. No unit divides the vocabulary."""
    width, vocab = 256, 331
    ranks = Ranks(ops, number, width, vocab)
    starts = [0, *(vocab * rank // number // 32 * 32 for rank in range(1, number)), vocab]
    shares = [range(*ends) for ends in pairwise(starts)]
    table = torch.randn(vocab, width, generator=rng).cuda()
    norm = RmsNorm(torch.rand(width, device="cuda") + 0.5, 1e-5)
    heads = [matrix(ops, len(own), width, own.start) for own in shares]
    for size, spreads in ((rows, True), (max(1, rows // 2), False), (rows, True)):
        ids = torch.randint(0, vocab, (size,), generator=rng).cuda()
        given = [ids if rank == 0 or not spreads else ids * 0 for rank in range(number)]
        ranks.begin(size)
        parts = []
        for one, own, token_ids in zip(ranks.all, shares, given, strict=True):
            numbers, is_own = one.share_tokens(token_ids, own, spreads=spreads)
            assert torch.equal(token_ids, ids)
            parts.append((one, table[own.start : own.stop][numbers], is_own))
        for one, part, is_own in parts:  # one after the other, as nobody may wait here
            one._send(part, *one._slots(STAGES), is_own.data_ptr())
        x = table[ids]
        for one in ranks.all:
            target = torch.empty_like(x)
            one._pending = _Pending(None, target, STAGES)
            one.settle()
            assert torch.equal(target, x)
        # Two ranges of rows, and one without any. The others may send all before rank 0 reads.
        ranges = [x[: size // 2], x[:0], x[size // 2 :]]
        for part in ranges:
            for one, head, own in list(zip(ranks.all, heads, shares, strict=True))[1:]:
                one.send_logits(part, norm, head, own.start)
        for part in ranges:
            logits = torch.full((len(part), vocab), torch.nan, device="cuda")
            logits[:, : shares[0].stop] = ops.norm_linear(part, norm, heads[0])
            ranks.all[0].gather_logits(logits, shares[0].stop)
            whole = torch.cat([ops.norm_linear(part, norm, head) for head in heads], -1)
            assert torch.equal(logits, whole)
        for one, buffer in zip(ranks.all, ranks.buffers, strict=True):
            one.end()
            area = buffer[(one._buffers.logits_at(0) - one._buffers.addresses[0]) // 4 :]
            rest = buffer if one is ranks.all[0] else buffer[: -len(area)]
            assert bool((rest == UNSENT).all())


def test_partial_sums_that_are_no_numbers_arrive(ops: CudaTable) -> None:
    """One has the bits that stand for a value that has not arrived."""
    part = torch.tensor([[UNSENT, 0, 0x7F800000, 0x7FC00000]], dtype=torch.int32, device="cuda")
    ranks = Ranks(ops, 2, 4)
    ranks.begin(1)
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
        ranks.begin(2)
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
    ranks.begin(3)
    dense = ops.new_linear(DenseLayout(64, 32, torch.float16, has_bias=False))
    ops.fill_linear(dense, 0, DenseColumns(torch.randn(64, 32).half(), None))
    first = ranks.all[0]
    assert not first.multiply(torch.randn(3, 32).half().cuda(), dense, defers=True)
    other = matrix(ops, 32, 128, 1)
    assert not first.multiply(torch.randn(3, 128).half().cuda(), other, defers=True)
    assert not first.takes(torch.zeros(4, 64))


def test_replayed_graphs_exchange_anew(ops: CudaTable, rng: torch.Generator) -> None:
    rows, width = 3, 256
    ranks = Ranks(ops, 2, width)
    parts = [torch.zeros(rows, width, device="cuda") for _ in range(2)]
    x = torch.zeros(rows, width, device="cuda")

    def run() -> Tensor:
        ranks.begin(rows)
        results: list[Tensor] = []
        for _ in range(4):
            for one, part in zip(ranks.all, parts, strict=True):
                one.send(part)
            results += [one.await_sum(x, defers=True) for one in ranks.all]
            for one in ranks.all:
                one.settle()
        for one in ranks.all:
            one.end()
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
    assert len(memory.handle) == HANDLE_BYTES
    with pytest.raises(cuda.CudaError, match="shared_open"):
        memory.open(memory.handle)
    memory.close()
    memory.close()


def test_exchanges_have_as_many_rows_and_ranks_as_kernels_take() -> None:
    assert MAX_ROWS == cuda.CHUNK_ROWS
    assert MAX_RANKS == MAX_PEERS + 1


def rounded(values: Tensor) -> Tensor:
    """The values as packets have them: integers of 15 bits times a power of two."""
    packets = values.view(-1, PACKET_VALUES)
    exponents = packets.abs().amax(1, keepdim=True).frexp().exponent.double()
    step = torch.exp2(exponents - 14)
    return ((packets.double() / step).round().clamp(max=16383) * step).float().view(values.shape)


def large_sum(parts: Tensor) -> Tensor:
    """The sum of parts [ranks, count]. A rank does not round its own part of its own share."""
    ranks, count = parts.shape
    share = -(-count // (PACKET_VALUES * ranks)) * PACKET_VALUES
    total = torch.zeros(count)
    for rank, part in enumerate(parts):
        held = rounded(part)
        own = slice(rank * share, min(count, (rank + 1) * share))
        held[own] = part[own]
        total += held
    return rounded(total)


@pytest.mark.parametrize("start", [0, (1 << 31) - 4], ids=["new", "wrapping"])
@pytest.mark.parametrize("number", [2, 3, 4, 8])
def test_large_sums_are_those_of_packets_in_the_order_of_ranks(number: int, start: int) -> None:
    """Ranks pause at random, and parts follow one another without a wait of the host. The largest
    one fills the buffers. The counters of barriers begin at `start`. Values are of all sizes."""
    tables = connected_tables(number)
    ranks = Ranks(tables, number, 64, large=3 << 20)
    if start:
        ranks.count_from(start)
    sizes = (LargeSums.MIN_VALUES, 1_000_008, 3 << 20, LargeSums.MIN_VALUES + 8, 2_000_000)
    generator = torch.Generator().manual_seed(number)
    parts = [
        torch.randn(number, size, generator=generator)
        * torch.exp2(torch.randint(-40, 60, (1, size), generator=generator).float())
        for size in sizes
    ]
    held = [[part[rank].to(table.device) for part in parts] for rank, table in enumerate(tables)]
    pauses = torch.randint(0, 300_000, (len(sizes), number), generator=generator).tolist()
    for table in tables:
        torch.cuda.synchronize(table.device)  # all buffers are empty
    for one in ranks.all:
        one.timeout_ms, one.is_alone = 10_000, True
    for index in range(len(sizes)):
        for rank, one in enumerate(ranks.all):
            with torch.cuda.device(rank):
                torch.cuda._sleep(pauses[index][rank])  # type: ignore[no-untyped-call]
                assert one.add(held[rank][index]) is held[rank][index]
    for part, *found in zip(parts, *held, strict=True):
        expected = large_sum(part)
        assert all(torch.equal(one.cpu(), expected) for one in found)
    assert not any(one.has_ended for one in ranks.all)


def test_large_sums_of_extreme_values() -> None:
    """Nothing overflows, tiny values become zero, and a packet with a value that is not finite
    becomes NaNs, alone."""
    tables = connected_tables(2)
    count = 4 * LargeSums.MIN_VALUES
    ranks = Ranks(tables, 2, 64, large=count)
    parts = torch.zeros(2, count)
    for first in (0, count // 2):  # in the shares of both ranks
        parts[:, first] = 1.7e38
        parts[:, first + 1] = -1.0
        parts[0, first + 8] = 1e-45
        parts[0, first + 16] = torch.inf
        parts[1, first + 24] = torch.nan
        parts[:, first + 32] = 1.0
        parts[1, first + 33] = 2.0**-13
    for rank, one in enumerate(ranks.all):
        one.timeout_ms, one.is_alone = 10_000, True
        torch.cuda.synchronize(rank)
    held = [part.to(table.device) for part, table in zip(parts, tables, strict=True)]
    for part, one in zip(held, ranks.all, strict=True):
        one.add(part)
    one, other = (part.cpu() for part in held)
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    for first in (0, count // 2):
        assert one[first].item() == pytest.approx(3.4e38, rel=2**-14)
        assert one[first + 1 : first + 16].eq(0).all()
        assert one[first + 16 : first + 32].isnan().all()
        assert one[first + 32 : first + 34].tolist() == [2.0, 0.0]  # a step is 2^-12, halves even
    assert one.isfinite().sum() == count - 32


def test_large_sums_are_captured() -> None:
    """Replays add other values, and a sum outside of the graph may follow."""
    tables = connected_tables(2)
    ranks = Ranks(tables, 2, 64, large=1 << 20)
    held = [torch.zeros(1 << 20, device=table.device) for table in tables]
    graphs = []
    for table in tables:
        torch.cuda.synchronize(table.device)
    for rank, one in enumerate(ranks.all):
        one.timeout_ms, one.is_alone = 10_000, True
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.device(rank):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.graph(graphs[-1], stream=stream):
                for _ in range(3):
                    one.add(held[rank])
    for value in (1.0, 0.5, 3.0):
        for rank, graph in enumerate(graphs):
            with torch.cuda.device(rank):
                held[rank].fill_(value * (rank + 1))
                graph.replay()
                ranks.all[rank].add(held[rank])
        for part in held:
            assert bool((part == value * 3 * 2**3).all())


def test_a_large_sum_without_the_others_ends_in_time() -> None:
    tables = connected_tables(2)
    ranks = Ranks(tables, 2, 64, large=1 << 20)
    one = ranks.all[0]
    one.timeout_ms, one.is_alone = 200, True
    one.add(torch.ones(1 << 20, device=tables[0].device))
    torch.cuda.synchronize(tables[0].device)
    assert one.has_ended


def test_an_abort_ends_a_large_sum_that_waits() -> None:
    tables = connected_tables(2)
    ranks = Ranks(tables, 2, 64, large=1 << 20)
    one = ranks.all[0]
    one.is_alone = True
    torch.cuda.synchronize(tables[0].device)
    one.add(torch.ones(1 << 20, device=tables[0].device))
    time.sleep(0.2)
    assert not torch.cuda.current_stream(tables[0].device).query()
    one.abort()
    torch.cuda.synchronize(tables[0].device)
