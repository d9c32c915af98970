"""Kernels of one row's experts: loads of one kind, and tables that end with a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from kernel_support import assert_norm_within, normal, packed
from quant_support import Shape
from test_joined_experts_on_gpu import join, shared_expert
from test_moe_on_gpu import BOUND, FORMS, Experts, choice, sizes

from exl_core.ops.backends.cuda.experts import CudaExperts
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.moe import ExpertLayer, Routed, Routing
from exl_core.ops.table import OpTable

pytestmark = pytest.mark.cuda

ONE_KIND = {
    "4-bits": FORMS["4-bits"],
    "zeros": sizes([Shape(((4, 17, 128),), 0, "zeros")], [Shape(((4, 3, 128),), 0, "zeros")]),
    "groups-of-32": FORMS["groups-of-32"],
    "mxfp4": FORMS["mxfp4"],
    "other-kinds": sizes([Shape(((4, 3, 128),), 0)], [Shape(((4, 9, 32),), 0)]),
}


@pytest.mark.parametrize("has_route", [False, True])
@pytest.mark.parametrize("form", ONE_KIND)
def test_kernels_of_one_kind_have_the_bits_of_the_general_one(
    gpu_table: OpTable, rng: torch.Generator, *, form: str, has_route: bool
) -> None:
    experts = Experts(gpu_table, rng, ONE_KIND[form], 9)
    found = cast(CudaExperts, experts.gate_up), cast(CudaExperts, experts.down)
    assert all(one.only != 0 for one in found)
    gate_up, down = (replace(one, only=0) for one in found)
    own, general = experts.mlp(), replace(experts.mlp(), gate_up=gate_up, down=down)
    table = cast(Any, gpu_table).on_device
    x = normal(rng, 1, experts.d).to(table.device)
    if not has_route:
        routed = choice(rng, 1, 9, 4)
        got = gpu_table.expert_mlp(x.cpu(), routed, own)
        assert torch.equal(got, gpu_table.expert_mlp(x.cpu(), routed, general))
        assert_norm_within(got, experts.outputs(x.cpu(), routed), BOUND)
        return
    w = packed(gpu_table, normal(rng, 9, experts.d) / experts.d**0.5)
    norm = RmsNorm(torch.ones(experts.d, device=table.device), 1e-5)
    layer = ExpertLayer(norm, w, Routing(4), None, own)
    other = replace(layer, experts=general)
    assert torch.equal(table.add_experts_(x.clone(), layer), table.add_experts_(x.clone(), other))


@pytest.mark.parametrize("form", ONE_KIND)
def test_addresses_are_computed_or_read(
    gpu_table: OpTable, rng: torch.Generator, *, form: str
) -> None:
    """Experts lie side by side, so that kernels compute where they are; otherwise they read it."""
    experts = Experts(gpu_table, rng, ONE_KIND[form], 9)
    found = cast(CudaExperts, experts.gate_up), cast(CudaExperts, experts.down)
    assert all(one.places[0] is not None for one in found)
    gate_up, down = (replace(one, places=(None, None)) for one in found)
    read = replace(experts.mlp(), gate_up=gate_up, down=down)
    x, routed = normal(rng, 1, experts.d), choice(rng, 1, 9, 4)
    got = gpu_table.expert_mlp(x, routed, experts.mlp())
    assert torch.equal(got, gpu_table.expert_mlp(x, routed, read))


SLICED = {
    "four-slices": sizes([Shape(((4, 2, 128),), 0)], [Shape(((4, 11, 128),), 0)]),
    "eight-slices": sizes([Shape(((4, 2, 128),), 0)], [Shape(((4, 35, 128),), 0)]),
    "widths": sizes(
        [Shape(((5, 1, 128), (4, 2, 128)), 0, permuted=True)],
        [Shape(((6, 2, 128), (4, 7, 128), (3, 4, 64)), 0, permuted=True)],
    ),
    "mxfp4": sizes(
        [Shape(((4, 4, 32),), 0, "mxfp4", torch.uint8, has_bias=True)],
        [Shape(((4, 45, 32),), 0, "mxfp4", torch.uint8, has_bias=True)],
    ),
}
"""Experts whose down has more slices for each row than two thread blocks have warps. With eight
slices, inputs of more than one would be too large."""


@pytest.mark.parametrize("top_k", [3, 8])
@pytest.mark.parametrize("form", SLICED)
def test_slices_of_one_warp_have_the_bits_of_more_rows(
    gpu_table: OpTable, rng: torch.Generator, *, form: str, top_k: int
) -> None:
    experts = Experts(gpu_table, rng, SLICED[form], 9)
    x, routed = normal(rng, 3, experts.d), choice(rng, 3, 9, top_k)
    whole = gpu_table.expert_mlp(x, routed, experts.mlp())
    assert_norm_within(whole, experts.outputs(x, routed), BOUND)
    for row in range(3):
        one = slice(row, row + 1)
        part = Routed(routed.ids[one], routed.weights[one])
        assert torch.equal(gpu_table.expert_mlp(x[one], part, experts.mlp()), whole[one])


def test_loads_of_several_kinds_have_nothing_in_common(
    gpu_table: OpTable, rng: torch.Generator
) -> None:
    for form in ("permuted", "layouts-of-each", "zeros", "minimums", "tables", "widths"):
        experts = Experts(gpu_table, rng, FORMS[form], 3)
        assert cast(CudaExperts, experts.gate_up).only == 0


@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("hidden", [64, 96, 128])
def test_a_shared_expert_is_the_last_entry_of_the_tables(
    gpu_table: OpTable, rng: torch.Generator, *, hidden: int, count: int
) -> None:
    """A kernel that kept the entries of `count` experts only read an address past them."""
    form = sizes([Shape(((4, hidden // 32, 32),), 0)], [Shape(((4, 2, 32),), 0)])
    FORMS["tiny"] = form
    try:
        experts = Experts(gpu_table, rng, form, count)
        shared = shared_expert(gpu_table, rng, "tiny", 1)
    finally:
        del FORMS["tiny"]
    table = cast(Any, gpu_table).on_device
    routing = Routing(min(count, 4))
    w = packed(gpu_table, normal(rng, count, hidden) / hidden**0.5)
    norm = RmsNorm(torch.ones(hidden, device=table.device), 1e-5)
    joined = join(table, experts, shared, None)
    assert joined is not None
    plain = ExpertLayer(norm, w, routing, None, experts.mlp())
    layer = replace(plain, joined=joined)
    x = 3 * normal(rng, 1, hidden)
    before = table.add_experts_(x.to(table.device), plain).cpu()
    after = table.add_experts_(x.to(table.device), layer).cpu()
    h = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    assert_norm_within((after - before).double(), shared.outputs(h), BOUND)
