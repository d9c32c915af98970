"""`gate_heads`: heads times an activation of their gates, with an RMSNorm, on every backend."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from kernel_support import activation_types, assert_near, assert_norm_within, normal, strided_rows
from quant_support import Shape, filled, make_matrix
from torch import Tensor
from torch.nn.functional import silu

from exl_core.ops.elementwise import Gating, RmsNorm
from exl_core.ops.table import OpTable

HEADS, ROWS = 6, (1, 5, 8, 9, 17, 40, 64)


def gating_of(rng: torch.Generator, head_dim: int, kind: str) -> Gating:
    """The kinds of attention, of delta nets (two), and of Mamba-2 with factors of all heads."""
    one, every = normal(rng, head_dim), normal(rng, HEADS * head_dim)
    return {
        "attention": Gating("sigmoid", head_dim),
        "delta": Gating("silu", head_dim, RmsNorm(one, 1e-6)),
        "kimi": Gating("sigmoid", head_dim, RmsNorm(one, 1e-5)),
        "mamba": Gating("silu", head_dim, RmsNorm(every, 1e-5), is_gate_first=True),
    }[kind]


def exact(x: Tensor, gate: Tensor, gating: Gating) -> Tensor:
    x, gate = x.double(), gate.double()
    act = silu(gate) if gating.kind == "silu" else torch.sigmoid(gate)
    if gating.norm is None:
        return x * act
    if gating.is_gate_first:
        x = x * act
    heads = x.view(len(x), -1, gating.head_dim)
    weight = gating.norm.weight.double()
    weight = weight.view(-1, gating.head_dim)
    y = heads / (heads.square().mean(-1, keepdim=True) + gating.norm.eps).sqrt() * weight
    return y.flatten(1) if gating.is_gate_first else y.flatten(1) * act


@pytest.mark.parametrize("kind", ["attention", "delta", "kimi", "mamba"])
@pytest.mark.parametrize("head_dim", [20, 128, 700])
def test_heads_are_normed_and_gated(
    table: OpTable, rng: torch.Generator, head_dim: int, kind: str
) -> None:
    gating = gating_of(rng, head_dim, kind)
    for dtype in activation_types(table):
        x, gate = (strided_rows(rng, 7, HEADS * head_dim).to(dtype) for _ in range(2))
        y = cast(Tensor, table.gate_heads(x, gate, gating))
        want = exact(x, gate, gating)
        assert_near(table, y, want, 1e-5 * float(want.abs().max()), gpu_bound=5e-4)


def test_all_heads_of_a_row_have_one_gate(table: OpTable, rng: torch.Generator) -> None:
    x, gate, gating = strided_rows(rng, 9, 300), strided_rows(rng, 9, 1), Gating("sigmoid", 300)
    y = cast(Tensor, table.gate_heads(x, gate, gating))
    want = exact(x, gate, gating)
    assert_near(table, y, want, 1e-5 * float(want.abs().max()), gpu_bound=5e-4)


@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["attention", "delta", "mamba"])
def test_a_quantized_matrix_reads_gated_heads(
    gpu_table: OpTable, rng: torch.Generator, kind: str, rows: int, *, is_permuted: bool
) -> None:
    """The same bits as from the tensor, whose inputs another kernel prepares."""
    k, n = HEADS * 128, 96
    gating = gating_of(rng, 128, kind)
    w = filled(gpu_table, make_matrix(rng, Shape(((4, k // 128, 128),), n, permuted=is_permuted)))
    x, gate = strided_rows(rng, rows, k), strided_rows(rng, rows, k).half()
    tensor = cast(Tensor, gpu_table.gate_heads(x, gate, gating))
    inputs = gpu_table.gate_heads(x, gate, gating, w)
    assert not isinstance(inputs, Tensor), "the matrix has a form of its own"
    start = normal(rng, rows, n)
    y = gpu_table.linear_add_(inputs, w, start.clone())
    expected = gpu_table.linear_add_(tensor, w, start.clone())
    assert_norm_within(y, expected.double(), 1e-6)
