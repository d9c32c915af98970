"""Two scratch buffers and the streams that fill and read them, within captures and outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.slices import Slices

pytestmark = pytest.mark.cuda

SIZES = (1 << 12, 1 << 20, 1 << 16)  # an odd number: after a pass the other buffer has its turn


def one_pass(slices: Slices, out: Tensor, first: int = 1, pause: int = 0) -> None:
    """out[i] = i + first, through a buffer each, which is read after a pause of so many cycles."""
    for i, size in enumerate(SIZES):
        with slices.next(size) as slice_:
            with slice_.filling():
                slice_.memory.fill_(i + first)
            if pause:
                torch.cuda._sleep(pause)
            out[i : i + 1].copy_(slice_.memory[-1:])


def test_a_capture_after_a_pass_and_passes_after_the_capture() -> None:
    slices = Slices(Gpu(torch.device("cuda", 0)))
    out = torch.zeros(len(SIZES), device="cuda")
    expected = torch.tensor([1.0, 2.0, 3.0])
    one_pass(slices, out)
    assert torch.equal(out.cpu(), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_pass(slices, out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out.cpu(), expected)
        out.zero_()
        one_pass(slices, out)
        assert torch.equal(out.cpu(), expected)


def test_a_pass_waits_for_a_graph_that_still_runs() -> None:
    slices = Slices(Gpu(torch.device("cuda", 0)))
    in_graph, beside = torch.zeros(2, len(SIZES), device="cuda")
    one_pass(slices, in_graph)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_pass(slices, in_graph, pause=20_000_000)
    one_pass(slices, beside)  # the first one after a capture makes its events
    for first in (11, 21):
        in_graph.zero_()
        torch.cuda.synchronize()
        graph.replay()
        slices.begin_pass()
        one_pass(slices, beside, first)
        assert in_graph.tolist() == [1.0, 2.0, 3.0]
        assert beside.tolist() == [float(first + i) for i in range(len(SIZES))]
