"""Sampling on a GPU: tokens for the next pass, captured graphs, limits of the C interface.

`tests/kernels/test_sampling_rows.py` compares the tokens with the reference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.sampling import Capacity, RowSampler, SampleBuffers
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.sampling import LogitEdits, NextStep, PartLogits, RowSettings
from exl_kernels import cuda
from support.sampling_cases import CHAINS, assert_same, reference_samples, settings_of

pytestmark = pytest.mark.cuda


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20)


def test_the_next_pass_is_launched_before_the_host_synchronizes(
    gpu: Gpu, rng: torch.Generator
) -> None:
    logits = torch.randn(5, 5003, generator=rng) * 3
    logits[3] = math.nan
    rows = [RowSettings(i, uniform=0.2 * i, top_k=i % 3) for i in (4, 3, 0, 2)]
    next_ids = torch.full((6,), -7, device="cuda")
    launched: list[Tensor] = []
    next_step = NextStep(next_ids[1:5], lambda: launched.append(next_ids.clone()))
    sampled = [one.token_id for one in RowSampler(gpu).draw(logits.cuda(), rows, next_step)]
    assert sampled == [one.token_id for one in reference_samples(logits, rows)]
    assert sampled[1] == -1
    assert [one.tolist() for one in launched] == [[-7, sampled[0], 0, *sampled[2:], -7]]


@pytest.mark.parametrize("num_top", [0, cuda.MAX_TOP + 1])
def test_a_part_does_not_wait_for_logits_that_are_computed_after_its_own(
    num_top: int, rng: torch.Generator
) -> None:
    table = CudaTable(torch.device("cuda", 0), threads=1)
    logits = torch.randn(7, 5003, generator=rng) * 3
    rows = [RowSettings(i, uniform=0.1 * i, num_top=num_top) for i in range(7)]
    wanted = [one.token_id for one in reference_samples(logits, rows)]
    next_ids = torch.zeros(7, dtype=torch.int64, device="cuda")
    passes = torch.cuda.current_stream()
    parts: list[Any] = []
    is_over = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for own in torch.split(logits, 4):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        parts.append(PartLogits(own.cuda(), stream, first_row=4 * len(parts)))
        parts[-1].stream.wait_stream(passes)
    # About half a second of other work on the stream of passes.
    torch.cuda._sleep(1 << 30)  # type: ignore[no-untyped-call]
    is_over.record(passes)
    are_early: list[bool] = []

    def launch() -> None:
        torch.cuda.current_stream().synchronize()
        are_early.append(not is_over.query())  # type: ignore[no-untyped-call]

    steps = [NextStep(own, launch) for own in torch.split(next_ids, 4)]
    sampled = table.sample_parts(parts, [rows[:4], rows[4:]], steps)
    assert [one.token_id for one in sampled] == next_ids.tolist() == wanted
    assert are_early == [True, True] or num_top


def test_tokens_sampled_on_the_host_reach_the_next_pass() -> None:
    table = CudaTable(torch.device("cuda", 0), threads=1)
    logits = torch.randn(2, 5003, generator=torch.Generator().manual_seed(3)).cuda()
    rows = [RowSettings(0, num_top=cuda.MAX_TOP + 1), RowSettings(1, uniform=0.7)]
    next_ids = torch.zeros(2, dtype=torch.int64, device="cuda")
    launched: list[list[int]] = []
    sampled = table.sample_rows(
        logits, rows, NextStep(next_ids, lambda: launched.append(next_ids.tolist()))
    )
    assert launched == [[one.token_id for one in sampled]]


def test_a_captured_graph_samples_with_settings_that_are_filled_in_later(
    gpu: Gpu, rng: torch.Generator
) -> None:
    vocab = 30_000
    logits = torch.randn(4, vocab, generator=rng) * 3
    on_device = logits.cuda()
    buffers = SampleBuffers(gpu, Capacity(4, 16, 0, 5), vocab)
    rows = [RowSettings(i, num_top=5) for i in range(4)]
    buffers.fill(rows)
    gpu.workspace("sample", 4, vocab)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.enqueue(on_device, 4)
    for chain in CHAINS.values():
        rows = [settings_of(i, chain, uniform=0.2 * i + 0.05, num_top=5) for i in (2, 0, 1, 3)]
        offsets = torch.tensor([4.0, -math.inf])
        edits = LogitEdits(torch.tensor([5, 9]), torch.tensor([1.5, 1.0]), offsets)
        rows[1] = replace(rows[1], edits=edits)
        buffers.fill(rows)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(buffers.read(rows), reference_samples(logits, rows), chain)


def test_more_top_tokens_than_the_kernel_returns_are_refused(gpu: Gpu) -> None:
    with pytest.raises(cuda.CudaError, match="InvalidValue"):
        RowSampler(gpu).draw(
            torch.zeros(1, 9000).cuda(), [RowSettings(0, num_top=cuda.MAX_TOP + 1)]
        )
