"""Scratch buffers, and the streams that fill and read them, inside and outside of captures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.slices import Slices

pytestmark = pytest.mark.cuda

SIZES = (1 << 12, 1 << 20, 1 << 16)  # an odd number, so that passes start with alternating buffers


def one_pass(slices: Slices, out: Tensor, first: int = 1, pause: int = 0) -> None:
    """out[i] = i + first, through one buffer each. `pause` delays the read by that many cycles."""
    for i, size in enumerate(SIZES):
        with slices.next(size) as slice_:
            with slice_.filling():
                slice_.memory.fill_(i + first)
            if pause:
                torch.cuda._sleep(pause)  # type: ignore[no-untyped-call]
            out[i : i + 1].copy_(slice_.memory[-1:])


def test_captures_and_passes_may_alternate() -> None:
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
    one_pass(slices, beside)  # the first pass after a capture creates its events
    for first in (11, 21):
        in_graph.zero_()
        torch.cuda.synchronize()
        graph.replay()
        slices.begin_pass()
        one_pass(slices, beside, first)
        assert in_graph.tolist() == [1.0, 2.0, 3.0]
        assert beside.tolist() == [float(first + i) for i in range(len(SIZES))]


@pytest.mark.parametrize("is_captured", [False, True])
def test_fills_begin_with_the_exchange(is_captured: bool) -> None:
    """A fill reads what work before the exchange has written, and not what work after it writes:
    it runs during the exchange, for which a pause stands here."""
    slices = Slices(Gpu(torch.device("cuda", 0)))
    clock, out = torch.zeros(2, len(SIZES), device="cuda")

    def work() -> None:
        slices.begin_pass()
        clock.zero_()
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        clock.fill_(1.0)
        slices.begin_exchange()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        clock.fill_(2.0)
        for i, size in enumerate(SIZES):
            with slices.next(size) as slice_:
                with slice_.filling():
                    slice_.memory.copy_(clock[i].expand(len(slice_.memory)))
                out[i : i + 1].copy_(slice_.memory[-1:])

    for _ in range(2):  # make the buffers and load the kernels, for which the host waits
        work()
    run = work
    if is_captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):  # type: ignore[no-untyped-call]
            work()
        run = graph.replay
    for _ in range(3):
        out.zero_()
        torch.cuda.synchronize()
        run()
        assert out.tolist() == [1.0, 1.0, 1.0]
