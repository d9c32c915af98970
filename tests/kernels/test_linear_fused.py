"""Linears fused with a norm before them, and with a gate or an addition after them."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from kernel_support import UNIT, assert_near, gated_linear, normal, packed, strided_rows
from quant_support import (
    GPU_BOUND,
    Answer,
    Matrix,
    Shape,
    answer,
    assert_product,
    filled,
    make_matrix,
)
from torch import Tensor

from exl_core.ops.elementwise import ActivationKind, GateKind, LayerNorm, Norm, RmsNorm, XIelu
from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable

EPS = 1e-5
K = 96
ROWS = [1, 7, 9, 33]
# Error of x after the norm: sum of squares, root, two products; see test_elementwise.py.
NORM_ERROR = 16 * UNIT
QUANTIZED = Shape(((4, 2, 32), (3, 1, 32)), 48, "zeros", permuted=True, has_bias=True)
OTHER = Shape(((6, 1, 96),), 48, "minimums")


class Dense:
    """Random float16 weights, with the interface of `Matrix`."""

    def __init__(self, rng: torch.Generator, n: int) -> None:
        self.weight, self.bias = normal(rng, n, K).half(), normal(rng, n)

    def answer(self, x: Tensor, x_error: float) -> Answer:
        exact = x.double() @ self.weight.double().T + self.bias
        terms = x.double().abs() @ self.weight.double().abs().T + self.bias.abs()
        return Answer(exact, ((K + 2) * UNIT + x_error) * terms, terms)


Source = Dense | Matrix
KINDS = ["dense", "quantized", "joined"]


def sources(rng: torch.Generator, kind: str) -> list[Source]:
    if kind == "dense":
        return [Dense(rng, 48)]
    if kind == "quantized":
        return [make_matrix(rng, QUANTIZED)]
    return [make_matrix(rng, QUANTIZED), Dense(rng, 48), make_matrix(rng, OTHER)]


def made(table: OpTable, parts: list[Source]) -> PackedLinear:
    linears = [
        packed(table, part.weight, part.bias) if isinstance(part, Dense) else filled(table, part)
        for part in parts
    ]
    return linears[0] if len(linears) == 1 else table.join(linears)


def answer_of(table: OpTable, parts: list[Source], x: Tensor, x_error: float = 0.0) -> Answer:
    answers = [
        part.answer(x, x_error) if isinstance(part, Dense) else answer(table, part, x, x_error)
        for part in parts
    ]
    return Answer(
        *(torch.cat(columns, dim=1) for columns in zip(*map(fields, answers), strict=True))
    )


def fields(of: Answer) -> tuple[Tensor, Tensor, Tensor]:
    return of.exact, of.bound, of.terms


def normed(x: Tensor, norm: Norm) -> Tensor:
    wide = x.double()
    if isinstance(norm, LayerNorm):
        wide = wide - wide.mean(1, keepdim=True)
    wide = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * norm.weight.double()
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    return wide if bias is None else wide + bias.double()


NORMS = ["rms", "layer", "layer-bias"]


def make_norm(rng: torch.Generator, kind: str) -> Norm:
    weight = normal(rng, K)
    if kind == "rms":
        return RmsNorm(weight, EPS)
    return LayerNorm(weight, normal(rng, K) if kind == "layer-bias" else None, EPS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"m{m}")
def test_linear_add_adds_to_the_residual(
    table: OpTable, rng: torch.Generator, rows: int, kind: str
) -> None:
    parts = sources(rng, kind)
    w, x = made(table, parts), strided_rows(rng, rows, K)
    before = 10 * normal(rng, rows, w.out_features)
    residual = before.clone()

    table.linear_add_(x, w, residual)

    right = answer_of(table, parts, x)
    assert_near(
        table,
        residual,
        before.double() + right.exact,
        right.bound + (K + 4) * UNIT * (before.abs() + right.terms),
        GPU_BOUND,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"m{m}")
@pytest.mark.parametrize("of_norm", NORMS)
def test_norm_linear_norms_first(
    table: OpTable, rng: torch.Generator, rows: int, kind: str, of_norm: str
) -> None:
    parts = sources(rng, kind)
    w, x = made(table, parts), 3 * strided_rows(rng, rows, K)
    norm = make_norm(rng, of_norm)
    x[0] *= 1e-3  # small enough for eps to matter

    y = table.norm_linear(x, norm, w)

    right = answer_of(table, parts, normed(x, norm), NORM_ERROR)
    assert_product(table, y, right)


XIELU = XIelu(0.7, 0.9)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "relu2", XIELU], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_norm", NORMS)
def test_norm_activated_linear_activates_its_outputs(
    table: OpTable, rng: torch.Generator, kind: str, of_norm: str, act: ActivationKind
) -> None:
    parts = sources(rng, kind)
    w, norm = made(table, parts), make_norm(rng, of_norm)
    for rows in ROWS:
        x = strided_rows(rng, rows, K)

        y = cast(Tensor, table.norm_activated_linear(x, norm, w, act))

        right = answer_of(table, parts, normed(x, norm), NORM_ERROR)
        # The slopes of all activations are at most 1.13, or 2 |x| + 1.
        slope = 1.13 if act in ("silu", "gelu_tanh") else 2 * (right.exact.abs() + right.bound) + 1
        error = slope * right.bound + 16 * UNIT * (right.exact.abs() + right.exact.square())
        assert_near(table, y, activated(right.exact, act), error, 2 * GPU_BOUND)


def activated(gate: Tensor, kind: ActivationKind | GateKind) -> Tensor:
    if isinstance(kind, XIelu):
        low = torch.expm1(gate.clamp(max=kind.eps)) - gate
        return torch.where(gate > 0, kind.alpha_p * gate**2, kind.alpha_n * low) + kind.beta * gate
    if kind == "relu2":
        return gate.clamp(min=0) ** 2
    if kind == "silu":
        return gate * torch.sigmoid(gate)
    return gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "kinds",
    [("quantized",), ("quantized", "quantized"), ("dense",), ("quantized", "dense")],
    ids=str,
)
@pytest.mark.parametrize("of_norm", NORMS)
def test_norm_gated_linear_multiplies_the_halves(
    table: OpTable, rng: torch.Generator, kinds: tuple[str, ...], gate: GateKind, of_norm: str
) -> None:
    """One matrix whose halves meet within a panel of 16 columns, or a gate joined with an up."""
    parts: list[Source] = [sources(rng, kind)[0] for kind in kinds]
    w, norm = made(table, parts), make_norm(rng, of_norm)
    for rows in ROWS:
        x = strided_rows(rng, rows, K)

        y = gated_linear(table, x, norm, w, gate)

        right = answer_of(table, parts, normed(x, norm), NORM_ERROR)
        (gates, ups), (gate_error, up_error) = (
            of.chunk(2, dim=1) for of in (right.exact, right.bound)
        )
        active = activated(gates, gate)
        # The slope of both activations is at most 1.13, their own error a few roundings.
        active_error = 1.13 * gate_error + 16 * UNIT * gates.abs()
        assert y.shape == (rows, w.out_features // 2)
        assert_near(
            table,
            y,
            active * ups,
            active_error * (ups.abs() + up_error)
            + active.abs() * (up_error + 2 * UNIT * ups.abs()),
            GPU_BOUND,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_written_to_out(cpu_table: OpTable, rng: torch.Generator, kind: str) -> None:
    w, x = made(cpu_table, sources(rng, kind)), normal(rng, 5, K)
    norm = RmsNorm(normal(rng, K), EPS)
    y = cpu_table.norm_linear(x, norm, w)
    gated = gated_linear(cpu_table, x, norm, w, "silu")
    out, narrow = torch.full_like(y, torch.nan), torch.full_like(gated, torch.nan)

    assert cpu_table.norm_linear(x, norm, w, out) is out
    assert gated_linear(cpu_table, x, norm, w, "silu", out=narrow) is narrow

    assert torch.equal(out, y)
    assert torch.equal(narrow, gated)
    for bad in (narrow, out.half(), out[:4], torch.empty(w.out_features, 5).T):
        with pytest.raises(ValueError, match="norm_linear: out"):
            cpu_table.norm_linear(x, norm, w, bad)
        with pytest.raises(ValueError, match="norm_gated_linear: out"):
            gated_linear(cpu_table, x, norm, w, "silu", out=bad if bad is not narrow else out)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_nan_in_a_row_stays_in_that_row_through_fused_calls(
    cpu_table: OpTable, rng: torch.Generator, rows: int
) -> None:
    w, norm = made(cpu_table, sources(rng, "joined")), RmsNorm(normal(rng, K), EPS)
    x, residual = normal(rng, rows, K), torch.zeros(rows, w.out_features)
    x[rows - 1, 17] = torch.nan

    cpu_table.linear_add_(x, w, residual)

    for y in (
        residual,
        cpu_table.norm_linear(x, norm, w),
        gated_linear(cpu_table, x, norm, made(cpu_table, sources(rng, "quantized")), "silu"),
    ):
        assert y[rows - 1].isnan().all()
        assert y[: rows - 1].isfinite().all()


def test_fused_calls_take_no_rows(cpu_table: OpTable, rng: torch.Generator) -> None:
    x, norm = torch.empty(0, K), RmsNorm(normal(rng, K), EPS)
    for kind in KINDS:
        w = made(cpu_table, sources(rng, kind))
        residual = torch.empty(0, w.out_features)

        cpu_table.linear_add_(x, w, residual)

        assert cpu_table.norm_linear(x, norm, w).shape == residual.shape
        assert gated_linear(cpu_table, x, norm, w, "silu").shape == (
            0,
            w.out_features // 2,
        )
