"""Norms, RoPE and gated activations against float64 and torch."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_support import (
    UNIT,
    activation_types,
    assert_near,
    assert_norm_within,
    normal,
    strided_rows,
)
from torch import Tensor

from exl_core.ops.elementwise import ActivationKind, GateKind, LayerNorm, RmsNorm, XIelu
from exl_core.ops.table import OpTable
from support.profiles import first_by_default

ROWS = [1, 3, 33, 130]
GPU_ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 130]
EPS = 1e-6
GPU_BOUND = {torch.float32: 2e-6, torch.float16: 5e-4}  # by the type of the result


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], weight.double(), eps)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("d", [1, 15, 64, 100, 577, 2048])
def test_rms_norm_matches_float64(table: OpTable, rng: torch.Generator, rows: int, d: int) -> None:
    x, weight = strided_rows(rng, rows, d), normal(rng, d)

    y = table.rms_norm(x, RmsNorm(weight, 1e-5))

    exact = exact_norm(x, weight, 1e-5)
    # Half of the d roundings of the sum, and a handful for root, quotient and products.
    assert_near(table, y, exact, (d / 2 + 8) * UNIT * exact.abs(), GPU_BOUND[y.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", GPU_ROWS)
@pytest.mark.parametrize("d", [32, 100, 576, 1536, 11008])
def test_rms_norm_of_either_type_of_activations(
    gpu_table: OpTable, rng: torch.Generator, rows: int, d: int, dtype: torch.dtype
) -> None:
    x, weight = normal(rng, rows, d + 24).to(dtype)[:, :d], normal(rng, d)
    y = gpu_table.rms_norm(x, RmsNorm(weight, EPS))
    assert_norm_within(y, exact_norm(x, weight, EPS), GPU_BOUND[y.dtype])


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("d", [15, 100, 2048])
def test_layer_norm_matches_float64(
    table: OpTable, rng: torch.Generator, rows: int, d: int, has_bias: bool
) -> None:
    x = strided_rows(rng, rows, d) + 3.0  # a mean that must be subtracted
    weight, bias = normal(rng, d), normal(rng, d)

    y = table.layer_norm(x, LayerNorm(weight, bias if has_bias else None, EPS))

    wide = (value.double() for value in (weight, bias))
    weight, bias = wide
    exact = torch.nn.functional.layer_norm(
        x.double(), (d,), weight, bias if has_bias else None, EPS
    )
    # Sums of d terms for mean and variance; the mean is about three deviations, which cancel.
    bound = (d + 64) * UNIT * (exact.abs() + 3 * weight.abs() + bias.abs())
    assert_near(table, y, exact, bound, GPU_BOUND[y.dtype])


def exact_xielu(x: Tensor) -> Tensor:
    positive, negative = XIELU.alpha_p * x * x, XIELU.alpha_n * (torch.expm1(x) - x)
    return torch.where(x > 0, positive, negative) + XIELU.beta * x


XIELU = XIelu(0.7, 1.3, eps=0.0)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2", XIELU], ids=str)
def test_activations_match_float64(
    table: OpTable, rng: torch.Generator, kind: ActivationKind
) -> None:
    x = 4 * strided_rows(rng, 33, 100)

    y = table.activation(x, kind)

    wide = x.double()
    exact = {
        "silu": lambda: torch.nn.functional.silu(wide),
        "gelu_tanh": lambda: torch.nn.functional.gelu(wide, approximate="tanh"),
        "relu2": lambda: wide.clamp(min=0).square(),
        XIELU: lambda: exact_xielu(wide),
    }[kind]()
    # tanh-GELU of a large negative number is a difference of numbers near 1.
    assert_near(table, y, exact, 16 * UNIT * (exact.abs() + wide.abs()), GPU_BOUND[y.dtype])


@pytest.mark.parametrize("rows", ROWS)
def test_add_adds_in_place_and_returns_the_sum(
    table: OpTable, rng: torch.Generator, rows: int
) -> None:
    residual, y = normal(rng, rows, 100), normal(rng, rows, 100)
    expected = residual + y
    assert table.add_(residual, y) is residual
    assert torch.equal(residual, expected)


def test_rms_norm_of_zeros_is_zero(table: OpTable) -> None:
    zeros = torch.zeros(2, 40)
    assert torch.equal(table.rms_norm(zeros, RmsNorm(torch.ones(40), EPS)), zeros)


def test_rms_norm_of_a_row_with_nan_is_nan(table: OpTable, rng: torch.Generator) -> None:
    x = normal(rng, 3, 40)
    x[1, 39] = torch.nan

    y = table.rms_norm(x, RmsNorm(torch.ones(40), EPS))

    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "d"), [(3, 64), (1, 256), (5, 20), (2, 7), (32, 128), (5, 80), (9, 256)]
)
def test_rms_norm_heads_norms_each_head_in_place(
    table: OpTable, rng: torch.Generator, rows: int, heads: int, d: int
) -> None:
    weight = normal(rng, d)
    for dtype in activation_types(table):
        fused = normal(rng, rows, heads * d + 9).to(dtype)
        x = fused[:, 4 : 4 + heads * d].view(rows, heads, d)
        before = fused.clone()
        exact = exact_norm(x, weight, EPS)

        table.rms_norm_heads_(x, RmsNorm(weight, EPS))

        assert_near(table, x, exact, (d / 2 + 8) * UNIT * exact.abs(), GPU_BOUND[dtype])
        assert torch.equal(fused[:, :4], before[:, :4])
        assert torch.equal(fused[:, 4 + heads * d :], before[:, 4 + heads * d :])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "d", "rotated"),
    [(3, 64, 64), (3, 80, 32), (3, 20, 20), (3, 36, 14), (3, 8, 0), (33, 64, 32), (8, 64, 64)],
)
def test_rope_rotates_pairs_and_leaves_the_rest(
    *, table: OpTable, rng: torch.Generator, rows: int, heads: int, d: int, rotated: int
) -> None:
    half = rotated // 2
    angle = 1000 * normal(rng, rows, half)
    cos, sin = angle.cos(), angle.sin()
    for dtype in activation_types(table):
        fused = normal(rng, rows, heads * d + 5).to(dtype)
        x = fused[:, : heads * d].view(rows, heads, d)
        before = x.clone()
        outside = fused[:, heads * d :].clone()

        table.rope_(x, cos, sin)

        pairs = torch.complex(before[..., :half].double(), before[..., half:rotated].double())
        turned = pairs * torch.complex(cos.double(), sin.double())[:, None]
        bound = 3 * UNIT * 1.5 * pairs.abs()  # |a c| + |b s| <= sqrt(2) |(a, b)|
        got = x[..., :half], x[..., half:rotated]
        for part, exact in zip(got, (turned.real, turned.imag), strict=True):
            assert_near(table, part, exact, bound, GPU_BOUND[dtype])
        assert torch.equal(x[..., rotated:], before[..., rotated:])
        assert torch.equal(fused[:, heads * d :], outside)


def gate_values(rng: torch.Generator, rows: int, d: int) -> Tensor:
    """Values from far below the range of exp to far above, and dense around zero."""
    scale = torch.logspace(-6, 2.5, rows * d).view(rows, d)
    return (normal(rng, rows, d) * scale)[:, torch.randperm(d, generator=rng)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("d", first_by_default([1, 24, 101, 1536, 5000], 4))
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activation_is_accurate_to_a_few_ulp(
    table: OpTable, rng: torch.Generator, rows: int, d: int, kind: GateKind
) -> None:
    gate, up = gate_values(rng, rows, d), normal(rng, rows, d)
    gate_up = torch.cat([gate, up, torch.full((rows, 3), torch.nan)], dim=1)[:, : 2 * d]

    y = table.gated_activation(gate_up, kind)

    wide, factor = gate.double(), up.double()
    if kind == "silu":
        roundings = torch.full_like(wide, 8.0)
        exact = wide / (1 + torch.exp(-wide)) * up
    elif kind == "clamped_swiglu":
        top, factor = wide.clamp(max=7.0), up.double().clamp(-7.0, 7.0) + 1
        roundings = 12 + 4 * (1.702 * top).abs().clamp(max=90)  # of the exponent, as below
        exact = top / (1 + torch.exp(-1.702 * top)) * factor
    else:
        # The exponent t is rounded four times. e^t turns that into a relative error of |t| times
        # as much.
        t = (-2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)).clamp(-90, 90)
        roundings = 8 + 4 * t.abs()
        exact = wide / (1 + torch.exp(t)) * up
    # Results that would be subnormal may come out as zero.
    bound = roundings * UNIT * exact.abs() + 2.0**-117 * factor.abs() + 2.0**-126
    assert_near(table, y, exact, bound, GPU_BOUND[y.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "d"), [(1, 8), (2, 100), (7, 1), (33, 1536), (130, 11008)])
def test_gated_activation_of_either_type_of_activations(
    *,
    gpu_table: OpTable,
    rng: torch.Generator,
    rows: int,
    d: int,
    kind: GateKind,
    dtype: torch.dtype,
) -> None:
    gate_up = (4 * normal(rng, rows, 2 * d + 8)).to(dtype)[:, : 2 * d]
    y = gpu_table.gated_activation(gate_up, kind)
    gates, ups = torch.split(gate_up.double(), d, dim=1)
    assert_norm_within(y, activated(gates, kind) * ups, GPU_BOUND[y.dtype])


def activated(gates: Tensor, kind: GateKind) -> Tensor:
    if kind == "silu":
        return torch.nn.functional.silu(gates)
    return torch.nn.functional.gelu(gates, approximate="tanh")


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation_agrees_with_torch_at_the_edges(
    cpu_table: OpTable, kind: GateKind
) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e30, -1e30, torch.inf, torch.nan, 88.5, -88.5, 3e-39]])

    y = cpu_table.gated_activation(torch.cat([gate, torch.ones_like(gate)], dim=1), kind)

    expected = activated(gate.double(), kind).float()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-36, equal_nan=True)


def test_a_clamped_gate_keeps_nan_and_the_limits(cpu_table: OpTable) -> None:
    gates = torch.tensor([[torch.nan, 1.0, 1e30, torch.inf, 1.0, 1.0]])
    ups = torch.tensor([[1.0, torch.nan, 1e30, 7.0, -torch.inf, -7.0]])

    y = cpu_table.gated_activation(torch.cat([gates, ups], dim=1), "clamped_swiglu")

    assert y[0, :2].isnan().all()
    limit = 7.0 * 8.0 / (1 + math.exp(-7.0 * 1.702))
    low = -6.0 / (1 + math.exp(-1.702))
    torch.testing.assert_close(y[0, 2:], torch.tensor([limit, limit, low, low]))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gates_far_from_zero_are_zero_or_one(gpu_table: OpTable, kind: GateKind) -> None:
    gates = torch.tensor([[-1e4, -100.0, -88.0, 88.0, 100.0, 1e4]])
    y = gpu_table.gated_activation(torch.cat([gates, torch.ones_like(gates)], dim=1), kind)
    assert y[0, :3].abs().max() < 1e-30
    assert torch.equal(y[0, 3:], gates[0, 3:])
