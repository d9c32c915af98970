"""A shared expert that kernels compute as further experts of its layer, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from kernel_support import assert_norm_within, normal, packed
from quant_support import Shape, filled
from test_moe_on_gpu import BOUND, FORMS, Experts, gated
from test_moe_on_gpu import _scaled as scaled
from torch import Tensor

from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertLayer, JoinedExperts, Routing
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable

pytestmark = pytest.mark.cuda

ROWS = (1, 2, 3, 5, 8, 9, 17, 33, 64)
CASES = [
    ("4-bits", 1), ("4-bits", 2), ("4-bits", 3), ("groups-of-32", 1), ("permuted", 1),
    ("layouts-of-each", 1), ("mxfp4", 1), ("fp8", 1), ("padded-and-permuted", 1),
]  # fmt: skip


class Shared(NamedTuple):
    """A shared expert `count` times as wide as the others: packed, and its exact weights."""

    gate_up: PackedLinear
    down: PackedLinear
    exact: tuple[Tensor, ...]

    def outputs(self, h: Tensor) -> Tensor:
        gate, up, down = self.exact
        return gated(h @ gate.T, h @ up.T, "silu") @ down.T


def shared_expert(table: OpTable, rng: torch.Generator, form: str, count: int) -> Shared:
    wide, narrow = FORMS[form].wide[0], FORMS[form].narrow[0]
    runs = tuple((bits, count * groups, rows) for bits, groups, rows in narrow.runs)
    wide = replace(wide, n=count * wide.n, has_bias=False)
    narrow = replace(narrow, runs=runs, has_bias=False)
    made = [scaled(rng, [shape], 1)[0] for shape in (wide, wide, narrow)]
    gate, up, down = (filled(table, one) for one in made)
    exact = tuple(one.weights().double() for one in made)
    return Shared(table.join([gate, up]), down, exact)


def join(
    table: Any, experts: Experts, shared: Shared, scores: PackedLinear | None
) -> JoinedExperts | None:
    found = table.join_experts(experts.mlp(), shared.gate_up, shared.down, scores)
    return cast(JoinedExperts | None, found)


@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize(("form", "count"), CASES)
def test_a_shared_expert_beside_the_others(
    gpu_table: OpTable, rng: torch.Generator, *, form: str, count: int, has_scores: bool
) -> None:
    """Rows choose all of five experts, so that no rounding changes a choice. A row has the same
    bits alone and among others."""
    experts, table = Experts(gpu_table, rng, FORMS[form], 5), cast(Any, gpu_table).on_device
    shared = shared_expert(gpu_table, rng, form, count)
    weight = (normal(rng, 5, experts.d) / experts.d**0.5).half()
    score = (normal(rng, 1, experts.d) / experts.d**0.5).half()
    w, gains = packed(gpu_table, weight, normal(rng, 5)), 1 + 0.2 * normal(rng, experts.d)
    norm = RmsNorm(gains.to(table.device), 1e-5)
    joined = join(table, experts, shared, packed(gpu_table, score) if has_scores else None)
    assert joined is not None
    assert joined.shared == count
    assert table.joins_experts(max(ROWS))
    layer = ExpertLayer(norm, w, Routing(5), None, experts.mlp(), joined)
    x = 3 * normal(rng, max(ROWS), experts.d)
    h = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * gains.double()
    added = experts.outputs(h.float(), gpu_table.route(h.float(), w, Routing(5)))
    own = shared.outputs(h)
    added += own * torch.sigmoid(h @ score.double().T) if has_scores else own
    alone = table.add_experts_(x[:1].to(table.device), layer).cpu()
    for rows in ROWS:
        got = table.add_experts_(x[:rows].to(table.device), layer).cpu()
        assert_norm_within(got - x[:rows], added[:rows], BOUND)
        assert torch.equal(got[:1], alone)


ROUTINGS = {
    "softmax": (16, Routing(4)),
    "one": (3, Routing(1, normalizes=False)),
    "groups": (160, Routing(6, groups=8, kept_groups=3)),
    "more-than-threads": (257, Routing(9, "sigmoid", factor=2.5)),
    "most": (70, Routing(31)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_choose_the_same_experts_as_without_a_shared_one(
    gpu_table: OpTable, rng: torch.Generator, name: str
) -> None:
    count, routing = ROUTINGS[name]
    experts = Experts(gpu_table, rng, FORMS["4-bits"], count)
    table, shared = cast(Any, gpu_table).on_device, shared_expert(gpu_table, rng, "4-bits", 1)
    w = packed(gpu_table, normal(rng, count, experts.d) / experts.d**0.5, normal(rng, count))
    score = packed(gpu_table, normal(rng, 1, experts.d) / experts.d**0.5)
    norm = RmsNorm(torch.ones(experts.d, device=table.device), 1e-5)
    joined = join(table, experts, shared, score)
    plain = ExpertLayer(norm, w, routing, None, experts.mlp())
    layer = replace(plain, joined=joined)
    x = 3 * normal(rng, 3, experts.d)
    h = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    scores = torch.sigmoid(gpu_table.linear(h.float(), score).double())
    wanted = shared.outputs(h) * scores
    for first, last in ((0, 1), (1, 2), (0, 3)):
        some = x[first:last].to(table.device)
        before = table.add_experts_(some.clone(), plain).cpu()
        after = table.add_experts_(some.clone(), layer).cpu()
        assert_norm_within((after - before).double(), wanted[first:last], BOUND)


def test_only_equal_experts_are_joined(gpu_table: OpTable, rng: torch.Generator) -> None:
    experts, table = Experts(gpu_table, rng, FORMS["4-bits"], 5), cast(Any, gpu_table).on_device
    other = Shape(((4, 3, 128),), FORMS["4-bits"].narrow[0].n)  # one and a half experts wide
    made = [scaled(rng, [replace(FORMS["4-bits"].wide[0], n=other.k)], 1)[0] for _ in range(2)]
    gate_up = table.join([filled(gpu_table, one) for one in made])
    down = filled(gpu_table, scaled(rng, [other], 1)[0])
    assert table.join_experts(experts.mlp(), gate_up, down, None) is None
    small = Experts(
        gpu_table, rng, FORMS["groups-of-32"], 5
    )  # seven groups: loads of four and three
    assert join(table, small, shared_expert(gpu_table, rng, "groups-of-32", 2), None) is None
    coarse = shared_expert(gpu_table, rng, "groups-of-32", 1)
    assert join(table, experts, coarse, None) is None
    invariant = get_table("cuda", isa=None, threads=1, batch_invariant=True)
    assert join(invariant, experts, shared_expert(gpu_table, rng, "4-bits", 1), None) is None
