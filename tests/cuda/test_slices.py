"""Two scratch buffers and the streams that fill and read them, within captures and outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.cuda.library import Gpu
from exl_core.ops.cuda.slices import Slices

pytestmark = pytest.mark.cuda

SIZES = (1 << 12, 1 << 20, 1 << 16)  # an odd number: after a pass the other buffer has its turn


def one_pass(slices: Slices, out: Tensor) -> None:
    """out[i] = i + 1, through a buffer each."""
    for i, size in enumerate(SIZES):
        with slices.next(size) as slice_:
            with slice_.filling():
                slice_.memory.fill_(i + 1)
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
