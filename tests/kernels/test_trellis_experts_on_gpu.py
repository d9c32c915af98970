"""Experts of trellis codes (EXL3) on a GPU, against float64.

The kernels read the experts in use once each. The kernel for decode multiplies tiles of 4 rows of
an expert (mul1) or 8 (the other codebooks), the batch kernel 32, the prompt kernel 64. `compute`
chooses by the mean number of rows per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from kernel_support import assert_norm_within, normal, packed
from torch import Tensor

from exl_core.ops.backends.cuda.trellis_experts import CudaTrellisExperts
from exl_core.ops.elementwise import ActivationKind, GateKind, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertLayer, ExpertMlp, Routed, Routing
from exl_core.ops.table import OpTable
from exl_core.ops.weights import Codebook
from support.trellis import RATES, random_exl3

BOUND = 3e-3
"""Two products with inputs rounded to float16 or to integers, and the rounding of the codebook."""

ROWS = (1, 2, 3, 5, 8, 9, 17, 33, 64, 65, 300)

BOOKS = [
    (rate, book)
    for book in ("mul1", "mcg", "3inst")
    for rate in RATES
    if book == "mul1" or rate == int(rate)
]


class Part(NamedTuple):
    """A matrix [out, in] of the experts: rates of the experts in turn, and its place in blocks."""

    rates: tuple[float, ...] = (4,)
    first_in: int = 0
    first_out: int = 0
    has_bias: bool = False


PLAIN = Part()


class Matrices(NamedTuple):
    """One matrix of each expert, packed, and its exact weights [in, out] and bias [out]."""

    packed: list[PackedLinear]
    exact: list[tuple[Tensor, Tensor]]


def matrices(
    table: OpTable,
    rng: torch.Generator,
    part: Part,
    size: tuple[int, int],
    *,
    book: Codebook = "mul1",
    count: int = 4,
) -> Matrices:
    """Random matrices with `size` (out, in), which about keep the magnitude of their inputs."""
    (n, k), made, exact = size, [], []
    for expert in range(count):
        rate = part.rates[expert % len(part.rates)]
        seed = int(torch.randint(1 << 30, (1,), generator=rng))
        layer = random_exl3(seed, rate, book, rows=part.first_in + k, columns=part.first_out + n)
        rows, columns = slice(part.first_in, part.first_in + k), slice(part.first_out, None)
        scale = float(layer.dense()[rows, columns][:, :n].std()) * k**0.5
        layer = replace(layer, in_scales=(layer.in_scales / scale).astype("f2"))
        bias = 0.3 * normal(rng, n) if part.has_bias else None
        layout = replace(
            layer.layout(n, k),
            first_in=part.first_in,
            first_out=part.first_out,
            has_bias=part.has_bias,
        )
        w = table.new_linear(layout)
        table.fill_linear(w, 0, layer.columns(bias))
        made.append(w)
        own = torch.zeros(n) if bias is None else bias
        exact.append((layer.dense()[rows, columns][:, :n].cuda(), own.double().cuda()))
    return Matrices(made, exact)


class Experts:
    """Random experts with their exact weights on the GPU. `is_gated`: gate, up and down."""

    def __init__(
        self,
        table: OpTable,
        rng: torch.Generator,
        book: Codebook = "mul1",
        *,
        count: int = 7,
        d: int = 256,
        inner: int = 384,
        wide: Part = PLAIN,
        up: Part | None = None,
        narrow: Part = PLAIN,
        is_gated: bool = True,
    ) -> None:
        self.d, self.count, self.is_gated = d, count, is_gated
        sides = [wide, wide if up is None else up] if is_gated else [wide]
        each = [matrices(table, rng, side, (inner, d), book=book, count=count) for side in sides]
        self.down = matrices(table, rng, narrow, (d, inner), book=book, count=count)
        self.wide = [one.exact for one in each]
        joined = [
            table.join(list(parts)) for parts in zip(*(one.packed for one in each), strict=True)
        ]
        self.gate_up, self.narrow = table.stack(joined), table.stack(self.down.packed)
        assert isinstance(self.gate_up, CudaTrellisExperts)
        assert isinstance(self.narrow, CudaTrellisExperts)

    def mlp(self, kind: GateKind | ActivationKind = "silu") -> ExpertMlp:
        return ExpertMlp(self.gate_up, self.narrow, kind, is_gated=self.is_gated)

    def outputs(self, x: Tensor, routed: Routed, kind: str = "silu") -> Tensor:
        """By the formula, in float64."""
        x = x.double().cuda()
        ids, weights = routed.ids.cuda(), routed.weights.double().cuda()
        y = torch.zeros(len(x), self.d, dtype=torch.float64, device="cuda")
        for expert in range(self.count):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            sides = [x[rows] @ side[expert][0] + side[expert][1] for side in self.wide]
            h = activated(sides, kind)
            weight, bias = self.down.exact[expert]
            y.index_add_(0, rows, (h @ weight + bias) * weights[rows, slots, None])
        return y.cpu()


def activated(sides: Sequence[Tensor], kind: str) -> Tensor:
    gate = sides[0]
    if kind == "clamped_swiglu":
        gate, up = gate.clamp_max(7), sides[1].clip(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "relu2": lambda y: y.relu().square(),
    }
    return acts[kind](gate) * (sides[1] if len(sides) == 2 else 1.0)


def choice(rng: torch.Generator, rows: int, experts: int, top_k: int) -> Routed:
    """Skewed: low numbers are chosen more often, and one expert not at all."""
    chances = 1.0 / torch.arange(1, experts + 1, dtype=torch.float32)
    chances[experts // 2] = 0
    ids = torch.multinomial(chances.expand(rows, -1), top_k, generator=rng)
    return Routed(ids.int(), torch.rand(rows, top_k, generator=rng) + 0.1)


def check(
    table: OpTable,
    rng: torch.Generator,
    experts: Experts,
    rows: Sequence[int],
    *,
    top_k: int,
    kind: Any = "silu",
) -> None:
    for count in rows:
        x, routed = normal(rng, count, experts.d), choice(rng, count, experts.count, top_k)
        got = table.expert_mlp(x, routed, experts.mlp(kind))
        assert_norm_within(got, experts.outputs(x, routed, kind), BOUND)


@pytest.mark.parametrize(("rate", "book"), BOOKS)
def test_each_rate_and_codebook(
    gpu_table: OpTable, rng: torch.Generator, rate: float, book: Codebook
) -> None:
    part = Part((rate,))
    experts = Experts(gpu_table, rng, book, count=5, wide=part, narrow=part)
    check(gpu_table, rng, experts, (1, 4, 9, 40, 150), top_k=2)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_any_number_of_rows(
    gpu_table: OpTable, rng: torch.Generator, book: Codebook, top_k: int
) -> None:
    check(gpu_table, rng, Experts(gpu_table, rng, book, count=13), (*ROWS, 2000), top_k=top_k)


@pytest.mark.parametrize("book", ["mul1", "3inst"])
@pytest.mark.parametrize(("d", "inner"), [(128, 128), (128, 1408), (2048, 128), (1152, 640)])
def test_shapes_that_divide_unequally(
    *, gpu_table: OpTable, rng: torch.Generator, book: Codebook, d: int, inner: int
) -> None:
    part = Part((3,))
    experts = Experts(gpu_table, rng, book, count=5, d=d, inner=inner, wide=part, narrow=Part((5,)))
    check(gpu_table, rng, experts, (1, 3, 7, 20, 130), top_k=2)


PLACES = {
    "padded": (Part(), Part()),
    "columns": (Part(first_out=37, has_bias=True), Part(first_in=37, has_bias=True)),
    "other-places": (Part(first_in=20, first_out=64), Part(first_out=100, has_bias=True)),
    "larger": (Part(first_out=90), Part(has_bias=True)),
}


@pytest.mark.parametrize("book", ["mul1", "mcg"])
@pytest.mark.parametrize("place", PLACES)
def test_parts_of_matrices_and_biases(
    gpu_table: OpTable, rng: torch.Generator, book: Codebook, place: str
) -> None:
    wide, narrow = PLACES[place]
    experts = Experts(gpu_table, rng, book, d=300, inner=201, wide=wide, narrow=narrow)
    check(gpu_table, rng, experts, (1, 6, 12, 40, 120), top_k=3)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
def test_rates_of_each_expert(gpu_table: OpTable, rng: torch.Generator, book: Codebook) -> None:
    experts = Experts(
        gpu_table, rng, book, wide=Part((2, 4, 3)), up=Part((4, 8)), narrow=Part((6, 1, 5, 4))
    )
    check(gpu_table, rng, experts, ROWS, top_k=3)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_each_gate(gpu_table: OpTable, rng: torch.Generator, kind: GateKind) -> None:
    check(gpu_table, rng, Experts(gpu_table, rng), (1, 6, 50), top_k=3, kind=kind)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2"])
def test_experts_without_a_gate(
    gpu_table: OpTable, rng: torch.Generator, kind: ActivationKind
) -> None:
    check(gpu_table, rng, Experts(gpu_table, rng, is_gated=False), (1, 6, 50), top_k=3, kind=kind)


@pytest.mark.parametrize("first_out", [0, 32])
def test_gate_and_up_in_one_matrix(
    gpu_table: OpTable, rng: torch.Generator, first_out: int
) -> None:
    fused = Part((4, 2), first_out=first_out, has_bias=True)
    both = Experts(gpu_table, rng, inner=512, wide=fused, is_gated=False)
    own = [[(w[:, i : i + 256], b[i : i + 256]) for w, b in both.wide[0]] for i in (0, 256)]
    both.wide, both.is_gated = own, True
    both.down = matrices(gpu_table, rng, PLAIN, (256, 256), count=7)
    both.narrow = gpu_table.stack(both.down.packed)
    check(gpu_table, rng, both, (1, 6, 50), top_k=3)


def test_tables_of_other_matrices(gpu_table: OpTable, rng: torch.Generator) -> None:
    """Experts whose kinds of matrices have different codecs are computed one by one."""
    wide = matrices(gpu_table, rng, PLAIN, (256, 256), book="mcg")
    down = matrices(gpu_table, rng, PLAIN, (256, 256))
    dense = [(normal(rng, 256, 256) / 16).half() for _ in range(4)]
    for other, exact in (
        (gpu_table.stack(down.packed), [one for one, _ in down.exact]),
        (
            gpu_table.stack([packed(gpu_table, one) for one in dense]),
            [one.double().T.cuda() for one in dense],
        ),
    ):
        mlp = ExpertMlp(gpu_table.stack(wide.packed), other, "relu2", is_gated=False)
        x, routed = normal(rng, 6, 256), choice(rng, 6, 4, 2)
        want = torch.zeros(6, 256, dtype=torch.float64, device="cuda")
        for expert, second in enumerate(exact):
            own, slots = (routed.ids == expert).nonzero(as_tuple=True)
            h = (x[own].double().cuda() @ wide.exact[expert][0]).relu().square()
            weights = routed.weights[own, slots, None].double().cuda()
            want.index_add_(0, own.cuda(), (h @ second) * weights)
        assert_norm_within(gpu_table.expert_mlp(x, routed, mlp), want.cpu(), BOUND)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
@pytest.mark.parametrize("rows", [3, 4, 5, 7, 8, 9, 31, 32, 33, 100])
def test_all_rows_with_the_last_expert(
    gpu_table: OpTable, rng: torch.Generator, rows: int, book: Codebook
) -> None:
    experts = Experts(gpu_table, rng, book, count=30)
    x, weights = normal(rng, rows, experts.d), torch.rand(rows, 1, generator=rng)
    routed = Routed(torch.full((rows, 1), 29, dtype=torch.int32), weights)
    got = gpu_table.expert_mlp(x, routed, experts.mlp())
    assert_norm_within(got, experts.outputs(x, routed), BOUND)


def test_many_experts(gpu_table: OpTable, rng: torch.Generator) -> None:
    experts = Experts(gpu_table, rng, count=160, d=128, inner=128)
    check(gpu_table, rng, experts, (1, 4, 64, 500), top_k=6)


def test_rows_of_other_sizes_and_nan(gpu_table: OpTable, rng: torch.Generator) -> None:
    """A row neither coarsens the others nor reaches them."""
    experts = Experts(gpu_table, rng, count=3)
    for rows in (4, 60):
        x, routed = normal(rng, rows, experts.d), choice(rng, rows, 3, 2)
        clean = gpu_table.expert_mlp(x, routed, experts.mlp())
        x[1] = 1e4 * x[1]
        x[2, 5] = torch.nan
        got = gpu_table.expert_mlp(x, routed, experts.mlp())
        others = [row for row in range(rows) if row not in (1, 2)]
        assert torch.equal(got[others], clean[others])
        assert got[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_strided_rows(gpu_table: OpTable, rng: torch.Generator, dtype: torch.dtype) -> None:
    table = cast(Any, gpu_table).on_device
    experts = Experts(gpu_table, rng)
    for offset in (0, 3):
        whole = normal(rng, 9, 300).to(dtype)
        x, routed = whole[:, offset : offset + experts.d], choice(rng, 9, experts.count, 2)
        on_device = whole.to(table.device)[:, offset : offset + experts.d]
        moved = Routed(routed.ids.to(table.device), routed.weights.to(table.device))
        got = table.expert_mlp(on_device, moved, experts.mlp()).cpu()
        assert_norm_within(got, experts.outputs(x, routed), BOUND)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
def test_experts_are_added_after_their_norm(
    gpu_table: OpTable, rng: torch.Generator, book: Codebook
) -> None:
    """Every row has all experts, so that no rounding changes a choice."""
    count, table = 5, cast(Any, gpu_table).on_device
    experts = Experts(gpu_table, rng, book, count=count)
    weight = (normal(rng, count, experts.d) / experts.d**0.5).half()
    w, gains = packed(gpu_table, weight, normal(rng, count)), 1 + 0.2 * normal(rng, experts.d)
    norm = RmsNorm(gains.to(table.device), 1e-5)
    layer = ExpertLayer(norm, w, Routing(count), None, experts.mlp())
    for rows in ROWS:
        x = 3 * normal(rng, rows, experts.d)
        h = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * gains.double()
        routed = gpu_table.route(h.float(), w, Routing(count))
        added = experts.outputs(h.float(), routed)
        got = table.add_experts_(x.to(table.device), layer).cpu()
        assert_norm_within(got - x, added, BOUND)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
@pytest.mark.parametrize("rows", [1, 20, 100, 600])
def test_results_are_the_same_in_every_run(
    gpu_table: OpTable, rng: torch.Generator, rows: int, book: Codebook
) -> None:
    experts = Experts(gpu_table, rng, book, count=12)
    x, routed = normal(rng, rows, experts.d), choice(rng, rows, 12, 2)
    first = gpu_table.expert_mlp(x, routed, experts.mlp())
    for _ in range(5):
        assert torch.equal(gpu_table.expert_mlp(x, routed, experts.mlp()), first)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
def test_a_row_has_the_same_bits_in_every_batch_of_decode(
    gpu_table: OpTable, rng: torch.Generator, book: Codebook
) -> None:
    experts = Experts(gpu_table, rng, book, count=40)
    x, routed = normal(rng, 70, experts.d), choice(rng, 70, 40, 2)
    whole = gpu_table.expert_mlp(x, routed, experts.mlp())
    for first, last in ((0, 1), (1, 8), (8, 45), (45, 70)):
        part = Routed(routed.ids[first:last], routed.weights[first:last])
        got = gpu_table.expert_mlp(x[first:last], part, experts.mlp())
        assert torch.equal(got, whole[first:last])


@pytest.mark.parametrize("book", ["mul1", "mcg"])
def test_the_invariant_mode_keeps_the_bits_of_a_row(
    invariant_table: OpTable, rng: torch.Generator, book: Codebook
) -> None:
    if not invariant_table.name.startswith("cuda"):
        pytest.skip("a test of the GPU")
    experts = Experts(invariant_table, rng, book)
    x, routed = normal(rng, 700, experts.d), choice(rng, 700, experts.count, 3)
    whole = invariant_table.expert_mlp(x, routed, experts.mlp())
    assert_norm_within(whole, experts.outputs(x, routed), BOUND)
    for first, last in ((0, 1), (1, 8), (8, 45), (45, 70), (70, 690)):
        part = Routed(routed.ids[first:last], routed.weights[first:last])
        got = invariant_table.expert_mlp(x[first:last], part, experts.mlp())
        assert torch.equal(got, whole[first:last])


@pytest.mark.parametrize("book", ["mul1", "mcg"])
@pytest.mark.parametrize("rows", [1, 6, 40, 200])
def test_a_captured_graph_follows_the_choice(
    gpu_table: OpTable, rng: torch.Generator, rows: int, book: Codebook
) -> None:
    """Router and experts in one graph, replayed with rows that choose other experts."""
    table = cast(Any, gpu_table).on_device
    experts = Experts(gpu_table, rng, book, count=16)
    w, routing = packed(gpu_table, normal(rng, 16, experts.d)), Routing(4)
    x = normal(rng, rows, experts.d).to(table.device)

    def layer() -> Tensor:
        return cast(Tensor, table.expert_mlp(x, table.route(x, w, routing), experts.mlp()))

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    for _ in range(3):
        x.copy_(normal(rng, rows, experts.d))
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, layer())
        routed = table.route(x, w, routing)
        routed = Routed(routed.ids.cpu(), routed.weights.cpu())
        assert_norm_within(replayed.cpu(), experts.outputs(x.cpu(), routed), BOUND)


def test_rows_that_need_several_calls(
    gpu_table: OpTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exl_core.ops.backends.cuda import trellis_experts

    experts = Experts(gpu_table, rng)
    for rows in (40, 300):
        x, routed = normal(rng, rows, experts.d), choice(rng, rows, experts.count, 2)
        whole = gpu_table.expert_mlp(x, routed, experts.mlp())
        monkeypatch.setattr(trellis_experts, "MAX_PAIRS", 2 * rows // 3)
        got = gpu_table.expert_mlp(x, routed, experts.mlp())
        assert_norm_within(got, whole.double(), BOUND)
        monkeypatch.undo()
