"""Hessian of a matrix's outputs: sums over calibration rows, blocks, weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.convert import outputs
from exl_core.convert.outputs import LEAST_WEIGHT, PairSums, block_width, output_hessian
from exl_core.convert.parallel import Workers

WORKERS = Workers(None, lambda: False)


def dense(blocks: Tensor, size: int) -> Tensor:
    return torch.block_diag(*blocks)[:size, :size]


@pytest.mark.parametrize(
    ("size", "width"), [(64, 128), (1024, 1024), (1025, 640), (11008, 1024), (14336, 1024)]
)
def test_blocks_are_whole_hadamard_blocks_of_about_equal_width(size: int, width: int) -> None:
    assert block_width(size) == width


def test_correlations_are_those_of_all_rows_in_the_order_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outputs, "BLOCK", 256)
    generator = torch.Generator().manual_seed(0)
    size, order = 300, torch.randperm(300, generator=generator)
    mixed = torch.randn(8, size, generator=generator)
    rows = [torch.randn(50, 8, generator=generator) @ mixed for _ in range(3)]
    sums = PairSums(order, torch.device("cpu"), WORKERS)
    for row in rows:
        sums.add(row)
    together = torch.cat(rows)
    squares = together.square().mean(0)

    found = sums.correlations(squares)

    assert found.shape == (2, 256, 256)
    expected = (together.T @ together / len(together)) / (squares[:, None] * squares).sqrt()
    expected = expected[order][:, order]
    mask = torch.arange(size) // 256
    expected = expected * (mask[:, None] == mask)
    torch.testing.assert_close(dense(found.float(), size), expected, atol=5e-3, rtol=0)
    assert not found[1, size - 256 :].any()


def test_outputs_without_gradients_have_no_correlations() -> None:
    sums = PairSums(torch.arange(128), torch.device("cpu"), WORKERS)
    assert not sums.correlations(torch.ones(128)).any()
    gradients = torch.randn(40, 128, generator=torch.Generator().manual_seed(1))
    gradients[:, 5] = 0
    sums.add(gradients)
    found = sums.correlations(gradients.square().mean(0))
    assert found.isfinite().all()
    assert not found[0, 5].any()


def test_weights_have_the_sensitivities_on_their_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "BLOCK", 128)
    generator = torch.Generator().manual_seed(2)
    importance, x = (torch.rand(shape, generator=generator) for shape in ((200,), (3, 256)))
    correlation = torch.rand(2, 128, 128, generator=generator).half()

    weights = output_hessian(importance, correlation, 256)

    assert weights.blocks is not None
    whole = dense(weights.blocks, 256)
    relative = importance.double() / importance.double().mean()
    expected = (relative + LEAST_WEIGHT) / (1 + LEAST_WEIGHT)
    torch.testing.assert_close(whole.diagonal()[:200], expected)
    torch.testing.assert_close(weights.diagonal[:200], expected)
    pair = float((relative[3] * relative[90]).sqrt() * correlation[0, 3, 90]) / (1 + LEAST_WEIGHT)
    assert float(whole[3, 90]) == pytest.approx(pair)
    assert not whole[:128, 128:].any()
    torch.testing.assert_close(weights.times(x.double()), x.double() @ whole)
    plain = output_hessian(importance, None, 256)
    torch.testing.assert_close(plain.times(x.double()), x.double() * plain.diagonal)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_unusable_sensitivities_weigh_all_outputs_alike(value: float) -> None:
    correlation = torch.eye(128)[None].half()
    weights = output_hessian(torch.full((128,), value), correlation, 128)
    assert weights.blocks is None
    assert torch.equal(weights.diagonal, torch.ones(128, dtype=torch.float64))
