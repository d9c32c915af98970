"""Norms, RoPE, gated activations and sums of exponentials, against float64 and torch."""

from __future__ import annotations

import pytest
import torch
from kernel_support import UNIT, assert_within, normal, strided_rows

from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.table import OpTable
from support.profiles import first_by_default

ROWS = [1, 3, 33, 130]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("d", [1, 15, 64, 100, 577, 2048])
def test_rms_norm_matches_float64(table: OpTable, rng, rows, d) -> None:
    x, weight = strided_rows(rng, rows, d), normal(rng, d)

    y = table.rms_norm(x, RmsNorm(weight, 1e-5))

    exact = torch.nn.functional.rms_norm(x.double(), (d,), weight.double(), 1e-5)
    # Half of the d roundings of the sum, and a handful for root, quotient and products.
    assert_within(y, exact, (d / 2 + 8) * UNIT * exact.abs())


def test_rms_norm_of_zeros_is_zero(table: OpTable) -> None:
    zeros = torch.zeros(2, 40)
    assert torch.equal(table.rms_norm(zeros, RmsNorm(torch.ones(40), 1e-6)), zeros)


def test_rms_norm_shows_nan(table: OpTable, rng) -> None:
    x = normal(rng, 3, 40)
    x[1, 39] = torch.nan

    y = table.rms_norm(x, RmsNorm(torch.ones(40), 1e-6))

    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "d"), [(3, 64), (1, 256), (5, 20), (2, 7)])
def test_rms_norm_heads_norms_each_head_in_place(table: OpTable, rng, rows, heads, d) -> None:
    fused = normal(rng, rows, heads * d + 9)
    x = fused[:, 4 : 4 + heads * d].view(rows, heads, d)
    weight, before = normal(rng, d), fused.clone()
    exact = torch.nn.functional.rms_norm(x.double(), (d,), weight.double(), 1e-6)

    table.rms_norm_heads_(x, RmsNorm(weight, 1e-6))

    assert_within(x, exact, (d / 2 + 8) * UNIT * exact.abs())
    assert torch.equal(fused[:, :4], before[:, :4])
    assert torch.equal(fused[:, 4 + heads * d :], before[:, 4 + heads * d :])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("d", "rotated"), [(64, 64), (80, 32), (20, 20), (36, 14), (8, 0)])
def test_rope_turns_pairs_and_leaves_the_rest(table: OpTable, rng, rows, d, rotated) -> None:
    heads, half = 3, rotated // 2
    fused = normal(rng, rows, heads * d + 5)
    x = fused[:, : heads * d].view(rows, heads, d)
    angle = 1000 * normal(rng, rows, half)
    cos, sin = angle.cos(), angle.sin()
    before = x.clone()
    outside = fused[:, heads * d :].clone()

    table.rope_(x, cos, sin)

    pairs = torch.complex(before[..., :half].double(), before[..., half:rotated].double())
    turned = pairs * torch.complex(cos.double(), sin.double())[:, None]
    magnitude = pairs.abs()[..., :] * 1.5  # |a c| + |b s| <= sqrt(2) |(a, b)|
    assert_within(x[..., :half], turned.real, 3 * UNIT * magnitude)
    assert_within(x[..., half:rotated], turned.imag, 3 * UNIT * magnitude)
    assert torch.equal(x[..., rotated:], before[..., rotated:])
    assert torch.equal(fused[:, heads * d :], outside)


def gate_values(rng: torch.Generator, rows: int, d: int) -> torch.Tensor:
    """From far below exp's range to far above, and dense around zero."""
    scale = torch.logspace(-6, 2.5, rows * d).view(rows, d)
    return (normal(rng, rows, d) * scale)[:, torch.randperm(d, generator=rng)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("d", first_by_default([1, 24, 101, 1536, 5000], 4))
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation_is_good_to_a_few_ulp(table: OpTable, rng, rows, d, kind) -> None:
    gate, up = gate_values(rng, rows, d), normal(rng, rows, d)
    gate_up = torch.cat([gate, up, torch.full((rows, 3), torch.nan)], dim=1)[:, : 2 * d]

    y = table.gated_activation(gate_up, kind)

    wide = gate.double()
    if kind == "silu":
        roundings = torch.full_like(wide, 8.0)
        exact = wide / (1 + torch.exp(-wide)) * up
    else:
        # The exponent itself is rounded four times; e^t carries that over times |t|.
        t = (-2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)).clamp(-90, 90)
        roundings = 8 + 4 * t.abs()
        exact = wide / (1 + torch.exp(t)) * up
    # Results that would be subnormal may come out as zero.
    assert_within(y, exact, roundings * UNIT * exact.abs() + 2.0**-117 * up.abs() + 2.0**-126)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation_agrees_with_torch_at_the_edges(table: OpTable, kind) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e30, -1e30, torch.inf, torch.nan, 88.5, -88.5, 3e-39]])

    y = table.gated_activation(torch.cat([gate, torch.ones_like(gate)], dim=1), kind)

    silu = kind == "silu"
    act = torch.nn.functional.silu if silu else torch.nn.functional.gelu
    expected = act(gate.double(), **({} if silu else {"approximate": "tanh"})).float()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", first_by_default([1, 7, 33, 100, 1025, 49152], 5))
@pytest.mark.parametrize("spread", [0.01, 4.0, 100.0])
def test_log_sum_exp_matches_float64(table: OpTable, rng, rows, n, spread) -> None:
    x = spread * strided_rows(rng, rows, n) + 30

    y = table.log_sum_exp(x)

    exact = x.double().logsumexp(1)
    # Each term and each run of a sum is rounded; the difference to the largest is, too.
    assert_within(y, exact, 40 * UNIT + 2 * UNIT * exact.abs())


@pytest.mark.parametrize("n", [1, 16, 40, 3000])
def test_log_sum_exp_at_the_edges(table: OpTable, rng, n) -> None:
    x = normal(rng, 5, n)
    x[0, n - 1], x[1, 0], x[2, n // 2] = torch.nan, torch.nan, torch.inf
    x[3] = -torch.inf
    assert table.log_sum_exp(x).isnan().tolist() == [True, True, True, True, False]
    x[4, 0] = 1e30
    x[4, 1:] = -torch.inf
    assert table.log_sum_exp(x)[4] == torch.tensor(1e30)


def test_log_sum_exp_refuses_rows_of_nothing(table: OpTable) -> None:
    with pytest.raises(ValueError, match="log_sum_exp: x"):
        table.log_sum_exp(torch.zeros(2, 0))
