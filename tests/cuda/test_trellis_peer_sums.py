"""Sums through the ranks' own memory of products with trellis codes (EXL3), on one GPU.

Every rank sends before any rank reads. The results have the bits of products, sums in the order of
the ranks, and norms that are computed one after the other.
"""

from __future__ import annotations

import pytest
import torch

from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.backends.cuda.trellis import PENDING_ROWS, CudaTrellisInputs
from exl_core.ops.elementwise import LayerNorm, RmsNorm
from exl_core.ops.weights import Codebook
from support.peer_ranks import ROUNDS, ROWS, Ranks, in_order, trellis

pytestmark = pytest.mark.cuda


TRELLISES: list[tuple[int, int, float, Codebook, int]] = [
    (2, 128, 3, "mcg", 0),
    (3, 1000, 2.5, "mul1", 24),
    (2, 4096, 4, "mul1", 0),
    (2, 1152, 5, "3inst", 3),  # no vector of four columns is aligned
    (8, 256, 8, "mul1", 0),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("number", "width", "rate", "book", "first_out"), TRELLISES)
def test_products_of_trellis_codes_send_their_sums_and_read_them(
    ops: CudaTable,
    rng: torch.Generator,
    *,
    number: int,
    width: int,
    rate: float,
    book: Codebook,
    first_out: int,
    rows: int,
) -> None:
    """Readers are four joined matrices, of which two calls prepare the inputs, and gated pairs that
    write to tensors or to prepared inputs."""
    ranks = Ranks(ops, number, width)
    sending = [
        trellis(ops, width, 256, seed, rate=rate, book=book, first_out=first_out)
        for seed in range(number)
    ]
    joined = ops.join([trellis(ops, 96, width, 50 + one, rate=one + 1) for one in range(4)])
    pair = ops.join([trellis(ops, 256, width, seed, rate=rate, book=book) for seed in (60, 61)])
    down = trellis(ops, 128, 256, 62)
    norm = RmsNorm(torch.rand(width, device="cuda") + 0.5, 1e-5)
    x = torch.randn(rows, width, generator=rng).cuda()
    ranks.begin(rows)
    for round_ in range(ROUNDS):
        inputs = [torch.randn(rows, 256, generator=rng).half().cuda() for _ in range(number)]
        expected = in_order(x, [ops.linear(h, w) for h, w in zip(inputs, sending, strict=True)])
        for one, h, w in zip(ranks.all, inputs, sending, strict=True):
            prepared = ops.inputs_for(w, h) if round_ % 2 else h
            if isinstance(prepared, CudaTrellisInputs):
                ops._linears.prepare_for(prepared, h)
            assert one.multiply(prepared, w, defers=True)
        targets = [one.await_sum(x, defers=True) for one in ranks.all]
        for one, target in zip(ranks.all, targets, strict=True):
            if rows > PENDING_ROWS:
                assert one.norm_linear(target, norm, joined, None) is None
                one.settle()
            elif round_ % 3 == 0:
                found = one.norm_linear(target, norm, joined, None)
                assert found is not None
                assert torch.equal(found, ops.norm_linear(expected, norm, joined))
            elif round_ % 3 == 1:
                out, same = ops.activations(rows, 256), ops.activations(rows, 256)
                assert one.norm_gated_linear(target, norm, pair, "silu", out) is out
                ops.norm_gated_linear(expected, norm, pair, "silu", same)
                assert torch.equal(out, same)
            else:
                plain, ys = ops.activations(rows, 256), torch.zeros(2, rows, 128, device="cuda")
                made = ops.inputs_for(down, plain)
                assert isinstance(made, CudaTrellisInputs)
                assert one.norm_gated_linear(target, norm, pair, "silu", made) is made
                ops.linear_add_(made, down, ys[0])
                same_made = ops.norm_gated_linear(
                    expected, norm, pair, "silu", ops.inputs_for(down, plain)
                )
                assert torch.equal(ys[0], ops.linear_add_(same_made, down, ys[1]))
            assert torch.equal(target, expected)
        x = targets[0]
    assert x.isfinite().all()
    ranks.end()


def test_products_of_trellis_codes_that_cannot_read_sums_leave_them_to_the_caller(
    ops: CudaTable,
) -> None:
    """LayerNorms and plain activations. A sum of values that are no numbers arrives."""
    rows, width = 3, 256
    ranks = Ranks(ops, 2, width)
    w, sending = trellis(ops, 128, width, 1), trellis(ops, width, 128, 2)
    weight = torch.ones(width, device="cuda")
    out = ops.activations(rows, 128)
    x = torch.randn(rows, width, device="cuda")
    ranks.begin(rows)
    for one in ranks.all:
        one.timeout_ms = 200
        assert one.multiply(torch.full((rows, 128), torch.nan).half().cuda(), sending, defers=True)
    for one in ranks.all:
        target = one.await_sum(x, defers=True)
        assert one.norm_linear(target, LayerNorm(weight, None, 1e-5), w, None) is None
        norm = RmsNorm(weight, 1e-5)
        assert one.norm_activated_linear(target, norm, w, "relu2", out) is None
        assert one.norm_linear(x, norm, w, None) is None
        one.settle()
        assert target.isnan().all()
        assert not one.has_ended
    ranks.end()
