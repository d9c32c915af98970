"""Mixture of experts: choices and weights by brute force, and experts against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernel_support import (
    UNIT,
    assert_near,
    assert_norm_within,
    is_gpu,
    normal,
    packed,
    strided_rows,
)
from quant_support import TILE_SETS, Matrix, Shape, filled, make_matrix
from torch import Tensor

from exl_core.ops.backends.cpu.table import CpuTable
from exl_core.ops.elementwise import GateKind
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, Routed, Routing
from exl_core.ops.table import OpTable
from exl_core.ops.weights import Codebook
from support.trellis import random_exl3

ROUTINGS = {
    "softmax": Routing(3),
    "unnormalized": Routing(4, normalizes=False),
    "sigmoid": Routing(3, "sigmoid", eps=1e-20, factor=2.5),
    "groups": Routing(3, "sigmoid", groups=4, kept_groups=2),
    "greedy-groups": Routing(4, groups=3, kept_groups=2, group_scores=1, normalizes=False),
    "all": Routing(12),
    "one": Routing(1, "sigmoid", normalizes=False),
}
NUM_EXPERTS = 12


def expected_choice(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts and weights of each row, float64, by the formulas alone."""
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias.double()
    size = NUM_EXPERTS // routing.groups
    ids = []
    for row in ranked.tolist():
        groups = [sorted(row[i : i + size])[::-1] for i in range(0, NUM_EXPERTS, size)]
        sums = [sum(group[: routing.group_scores]) for group in groups]
        kept = sorted(range(routing.groups), key=lambda g: -sums[g])[: routing.kept_groups]
        allowed = [e for e in range(NUM_EXPERTS) if e // size in kept]
        ids.append(sorted(allowed, key=lambda e: -row[e])[: routing.top_k])
    chosen = torch.tensor(ids)
    weights = scores.gather(1, chosen)
    if routing.normalizes:
        weights = weights / (weights.sum(1, keepdim=True) + routing.eps)
    return chosen, weights * routing.factor


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 7, 65])
def test_choices_and_weights_are_those_of_the_formulas(
    table: OpTable, rng: torch.Generator, rows: int, name: str, has_bias: bool
) -> None:
    routing, d = ROUTINGS[name], 67
    # Multiples of 1/8 in [-2, 2]: products and sums are exact in every backend. Distinct columns
    # spread the logits.
    x = torch.randint(-16, 17, (rows, d + 9), generator=rng)[:, 4 : 4 + d].float() / 8
    weight = torch.randint(-8, 9, (NUM_EXPERTS, d), generator=rng).float() / 32
    bias = normal(rng, NUM_EXPERTS) if has_bias else None
    logits = x.double() @ weight.double().T
    ids, weights = expected_choice(logits, routing, bias)

    got = table.route(x, packed(table, weight), routing, bias)

    assert got.ids.dtype is torch.int32
    is_same = (got.ids.long() == ids).all(1)
    ranked = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    ranked = ranked if bias is None else ranked + bias.double()
    gaps = ranked.sort(1).values.diff(dim=1).min(1).values
    assert bool((is_same | (gaps < 4 * UNIT)).all())  # float32 may see closer scores as equal
    assert_near(table, got.weights[is_same], weights[is_same], 40 * UNIT * routing.factor, 1e-5)


def test_of_equal_scores_the_lower_index_is_chosen(table: OpTable) -> None:
    weight = torch.zeros(NUM_EXPERTS, 4)
    weight[[2, 5, 9, 11], 0] = 1.0
    x = torch.tensor([[1.0, 0, 0, 0], [0.0, 1, 0, 0], [-1.0, 0, 0, 0]])

    got = table.route(x, packed(table, weight), Routing(3))

    assert got.ids.tolist() == [[2, 5, 9], [0, 1, 2], [0, 1, 3]]


def test_of_equal_groups_the_first_is_kept(table: OpTable) -> None:
    x, weight = torch.zeros(1, 4), torch.zeros(NUM_EXPERTS, 4)
    routing = Routing(4, "sigmoid", groups=6, kept_groups=2)
    assert table.route(x, packed(table, weight), routing).ids.tolist() == [[0, 1, 2, 3]]


def test_a_rows_choice_does_not_depend_on_the_other_rows(
    table: OpTable, rng: torch.Generator
) -> None:
    if is_gpu(table):
        pytest.skip("products of a GPU depend on the number of rows")
    x, w = normal(rng, 70, 33), packed(table, normal(rng, NUM_EXPERTS, 33))
    whole = table.route(x, w, Routing(4))
    for first, last in ((0, 1), (3, 8), (20, 70)):
        part = table.route(x[first:last], w, Routing(4))
        assert torch.equal(part.ids, whole.ids[first:last])
        assert torch.equal(part.weights, whole.weights[first:last])


def random_routing(rng: torch.Generator, rows: int, experts: int, top_k: int) -> Routed:
    ids = torch.stack([torch.randperm(experts, generator=rng)[:top_k] for _ in range(rows)])
    return Routed(ids.int(), torch.rand(rows, top_k, generator=rng) + 0.1)


def exact_mlp(
    x: Tensor,
    routed: Routed,
    matrices: tuple[list[Tensor], list[Tensor]],
    kind: GateKind,
    biases: tuple[list[Tensor], list[Tensor]] | None = None,
) -> Tensor:
    """The sum over the experts in float64. Matrices of gate_up and of down are float64
    [out_features, in_features], biases [out_features]."""
    gate_up, down = matrices
    y = torch.zeros(len(x), down[0].shape[0], dtype=torch.float64)
    for row, (ids, weights) in enumerate(
        zip(routed.ids.tolist(), routed.weights.double(), strict=True)
    ):
        for expert, weight in zip(ids, weights, strict=True):
            product = gate_up[expert] @ x[row].double()
            gate, up = (product if biases is None else product + biases[0][expert]).chunk(2)
            inner = gated(gate, up, kind)
            outer = down[expert] @ inner
            y[row] += weight * (outer if biases is None else outer + biases[1][expert])
    return y


def gated(gate: Tensor, up: Tensor, kind: GateKind) -> Tensor:
    if kind == "clamped_swiglu":
        gate, up = gate.minimum(torch.tensor(7.0)), up.clip(-7, 7)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_dense_experts_match_float64(
    table: OpTable, rng: torch.Generator, rows: int, dtype: torch.dtype, kind: GateKind
) -> None:
    d, inner, count = 43, 29, 6
    wide = [(normal(rng, 2 * inner, d) / d**0.5).to(dtype) for _ in range(count)]
    narrow = [(normal(rng, d, inner) / inner**0.5).to(dtype) for _ in range(count)]
    experts = ExpertMlp(
        table.stack([packed(table, weight) for weight in wide]),
        table.stack([packed(table, weight) for weight in narrow]),
        kind,
    )
    x, routed = strided_rows(rng, rows, d), random_routing(rng, rows, count, 3)

    got = table.expert_mlp(x, routed, experts)

    matrices = [w.double() for w in wide], [w.double() for w in narrow]
    exact = exact_mlp(x, routed, matrices, kind)
    assert_near(table, got, exact, 200 * UNIT * float(exact.abs().max()), 3e-3)


FOUR_BITS = ((4, 4, 32),)
LAYOUTS: dict[str, tuple[Shape, ...]] = {  # of the experts in turn, all with k = 128
    "equal": (Shape(FOUR_BITS, 0),),
    "minimums": (Shape(((5, 4, 32),), 0, "minimums"),),
    "zeros-permuted": (Shape(FOUR_BITS, 0, "zeros", permuted=True),),
    "own-permutations-and-widths": (
        Shape(((6, 1, 32), (4, 3, 32)), 0, permuted=True),
        Shape(((3, 2, 64),), 0, permuted=True),
        Shape(((8, 1, 48), (2, 1, 80)), 0, permuted=True),
    ),
    "groups-of-16": (Shape(((6, 8, 16),), 0, scale_dtype=torch.float32),),
    "minimums-of-16": (Shape(((2, 8, 16),), 0, "minimums", torch.float32),),
    "groups-of-16-and-32": (Shape(((3, 8, 16),), 0), Shape(FOUR_BITS, 0)),
    "table": (Shape(FOUR_BITS, 0, formula="iq4_nl"),),
    "fp8": (Shape(((8, 1, 128),), 0, formula="e4m3"),),
    "mxfp4": (Shape(FOUR_BITS, 0, "mxfp4", torch.uint8),),
}


def random_experts(
    rng: torch.Generator, layouts: tuple[Shape, ...], count: int, n: int
) -> list[Matrix]:
    """Matrices [n, 128] of the experts, scaled to keep the magnitude of their inputs."""
    found = []
    for expert in range(count):
        shape = layouts[expert % len(layouts)]
        matrix = make_matrix(rng, replace(shape, n=n))
        size = float(matrix.weights().std()) * 128**0.5
        if shape.formula == "mxfp4":
            size = round(math.log2(size))
            found.append(replace(matrix, scales=matrix.scales - size))
            continue
        offsets = matrix.offsets
        if shape.formula == "minimums" and offsets is not None:
            offsets = (offsets / size).to(offsets.dtype)
        scales = (matrix.scales / size).to(matrix.scales.dtype)
        found.append(replace(matrix, scales=scales, offsets=offsets))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 9, 70])  # 70: more rows per expert than decode has
def test_quantized_experts_match_float64(
    table: OpTable, rng: torch.Generator, rows: int, name: str
) -> None:
    count, top_k, inner = 7, 3, 128
    gate, up, down = (random_experts(rng, LAYOUTS[name], count, inner) for _ in range(3))
    experts = ExpertMlp(
        table.stack(
            [
                table.join([filled(table, a), filled(table, b)])
                for a, b in zip(gate, up, strict=True)
            ]
        ),
        table.stack([filled(table, matrix) for matrix in down]),
        "silu",
    )
    x, routed = strided_rows(rng, rows, 128), random_routing(rng, rows, count, top_k)

    got = table.expert_mlp(x, routed, experts)

    wide = [torch.cat([a.weights(), b.weights()]) for a, b in zip(gate, up, strict=True)]
    exact = exact_mlp(x, routed, (wide, [matrix.weights() for matrix in down]), "silu")
    # 16-bit activations change a product by about 1e-5; 12-bit ones and bfloat16 by 16 and 250
    # times as much.
    is_coarse = is_gpu(table) or table.name in TILE_SETS
    assert_norm_within(got, exact, 1e-2 if is_coarse else 1e-4)


def trellis_experts(
    table: OpTable, rng: torch.Generator, book: Codebook, size: tuple[int, int], rates: list[float]
) -> tuple[list[PackedLinear], list[Tensor]]:
    """Matrices (out, in) of trellis codes of the experts' rates, and their exact weights."""
    (n, k), made, exact = size, [], []
    for rate in rates:
        seed = int(torch.randint(1 << 30, (1,), generator=rng))
        layer = random_exl3(seed, rate, book, rows=k, columns=n)
        scale = float(layer.dense()[:k, :n].std()) * k**0.5
        layer = replace(layer, in_scales=(layer.in_scales / scale).astype("f2"))
        w = table.new_linear(layer.layout(n, k))
        table.fill_linear(w, 0, layer.columns())
        made.append(w)
        exact.append(layer.dense()[:k, :n].T)
    return made, exact


@pytest.mark.parametrize("book", ["mul1", "mcg", "3inst"])
@pytest.mark.parametrize("rows", [1, 2, 9, 70])
def test_experts_of_trellis_codes_match_float64(
    table: OpTable, rng: torch.Generator, rows: int, book: Codebook
) -> None:
    d, inner, rates = 150, 200, [4.0, 3.0, 2.0, 4.0, 6.0]
    gate, up = (trellis_experts(table, rng, book, (inner, d), rates) for _ in range(2))
    down = trellis_experts(table, rng, book, (d, inner), rates[::-1])
    joined = [table.join([a, b]) for a, b in zip(gate[0], up[0], strict=True)]
    experts = ExpertMlp(table.stack(joined), table.stack(down[0]), "silu")
    x, routed = strided_rows(rng, rows, d), random_routing(rng, rows, len(rates), 3)

    got = table.expert_mlp(x, routed, experts)

    wide = [torch.cat([a, b]) for a, b in zip(gate[1], up[1], strict=True)]
    exact = exact_mlp(x, routed, (wide, down[1]), "silu")
    # Kernels leave out the rounding of mul1's values to float16: 2.1e-4 of the weights' RMS in each
    # of three matrices.
    is_coarse = is_gpu(table) or table.name in TILE_SETS
    assert_norm_within(got, exact, 1e-2 if is_coarse else 6e-4)


@pytest.mark.parametrize("name", ["equal", "mxfp4", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 9, 70])
def test_experts_with_biases_and_a_clamped_gate_match_float64(
    table: OpTable, rng: torch.Generator, rows: int, name: str
) -> None:
    count, top_k, inner = 7, 3, 128
    layouts = tuple(replace(shape, has_bias=True) for shape in LAYOUTS[name])
    gate, up, down = (random_experts(rng, layouts, count, inner) for _ in range(3))
    pairs = list(zip(gate, up, strict=True))
    experts = ExpertMlp(
        table.stack([table.join([filled(table, a), filled(table, b)]) for a, b in pairs]),
        table.stack([filled(table, matrix) for matrix in down]),
        "clamped_swiglu",
    )
    x, routed = 4 * strided_rows(rng, rows, 128), random_routing(rng, rows, count, top_k)

    got = table.expert_mlp(x, routed, experts)

    biases = (
        [torch.cat([bias_of(a), bias_of(b)]) for a, b in pairs],
        [bias_of(matrix) for matrix in down],
    )
    wide = [torch.cat([a.weights(), b.weights()]) for a, b in pairs]
    narrow = [matrix.weights() for matrix in down]
    exact = exact_mlp(x, routed, (wide, narrow), "clamped_swiglu", biases)
    is_coarse = is_gpu(table) or table.name in TILE_SETS
    assert_norm_within(got, exact, 1e-2 if is_coarse else 1e-4)


def bias_of(matrix: Matrix) -> Tensor:
    assert matrix.bias is not None
    return matrix.bias.double()


def test_no_rows_give_no_outputs(table: OpTable, rng: torch.Generator) -> None:
    experts = ExpertMlp(
        table.stack([packed(table, normal(rng, 64, 40)) for _ in range(3)]),
        table.stack([packed(table, normal(rng, 40, 32)) for _ in range(3)]),
        "silu",
    )
    routed = Routed(torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2))
    assert table.expert_mlp(torch.zeros(0, 40), routed, experts).shape == (0, 40)


def test_a_rows_experts_do_not_depend_on_the_other_rows(
    invariant_table: OpTable, rng: torch.Generator
) -> None:
    table, rows = invariant_table, 45
    gate, up, down = (random_experts(rng, LAYOUTS["equal"], 6, 128) for _ in range(3))
    experts = ExpertMlp(
        table.stack(
            [
                table.join([filled(table, a), filled(table, b)])
                for a, b in zip(gate, up, strict=True)
            ]
        ),
        table.stack([filled(table, matrix) for matrix in down]),
        "silu",
    )
    x, routed = normal(rng, rows, 128), random_routing(rng, rows, 6, 2)
    whole = table.expert_mlp(x, routed, experts)
    for first, last in ((0, 1), (1, 4), (4, 44)):
        part = Routed(routed.ids[first:last], routed.weights[first:last])
        assert torch.equal(table.expert_mlp(x[first:last], part, experts), whole[first:last])


@pytest.mark.parametrize("layout", ["equal", "zeros-permuted", "fp8", "mxfp4"])
def test_a_call_computes_the_rows_that_are_in_memory_when_it_runs(
    kernels: OpTable, rng: torch.Generator, layout: str
) -> None:
    assert isinstance(kernels, CpuTable)
    gate, up, down = (random_experts(rng, LAYOUTS[layout], 6, 128) for _ in range(3))
    experts = ExpertMlp(
        kernels.stack(
            [
                kernels.join([filled(kernels, g), filled(kernels, u)])
                for g, u in zip(gate, up, strict=True)
            ]
        ),
        kernels.stack([filled(kernels, one) for one in down]),
        "silu",
    )
    x, out = torch.zeros(7, 128), torch.zeros(7, 128)
    routed = Routed(torch.zeros(7, 2, dtype=torch.int32), torch.zeros(7, 2))
    call = kernels.expert_call(x, routed, experts, out)
    for _ in range(2):
        chosen = random_routing(rng, 7, 6, 2)
        x.copy_(normal(rng, 7, 128))
        routed.ids.copy_(chosen.ids)
        routed.weights.copy_(chosen.weights)
        call.run()
        assert torch.equal(out, kernels.expert_mlp(x, chosen, experts))


@pytest.mark.parametrize("bad", [-1, 2])
def test_a_call_with_an_unknown_expert_gives_nan(
    kernels: OpTable, rng: torch.Generator, capfd: pytest.CaptureFixture[str], bad: int
) -> None:
    assert isinstance(kernels, CpuTable)
    experts = ExpertMlp(
        kernels.stack([packed(kernels, normal(rng, 2 * 12, 40)) for _ in range(2)]),
        kernels.stack([packed(kernels, normal(rng, 40, 12)) for _ in range(2)]),
        "silu",
    )
    routed = Routed(torch.tensor([[0], [bad]], dtype=torch.int32), torch.ones(2, 1))
    out = torch.zeros(2, 40)
    kernels.expert_call(torch.zeros(2, 40), routed, experts, out).run()
    assert out.isnan().all()
    assert f"a row chose expert {bad} of 2" in capfd.readouterr().err


def test_experts_outside_of_the_stack_are_refused(cpu_table: OpTable, rng: torch.Generator) -> None:
    table = cpu_table
    experts = ExpertMlp(
        table.stack([packed(table, normal(rng, 64, 40)) for _ in range(3)]),
        table.stack([packed(table, normal(rng, 40, 32)) for _ in range(3)]),
        "silu",
    )
    for wrong in (-1, 3):
        routed = Routed(torch.tensor([[0, wrong]], dtype=torch.int32), torch.ones(1, 2))
        with pytest.raises((ValueError, IndexError)):
            table.expert_mlp(torch.zeros(1, 40), routed, experts)


def test_experts_of_several_sizes_are_refused(cpu_table: OpTable, rng: torch.Generator) -> None:
    matrices = [packed(cpu_table, normal(rng, n, 40)) for n in (64, 48)]
    with pytest.raises(ValueError, match="stack"):
        cpu_table.stack(matrices)
