"""Experts on a GPU in the shapes that matter to its kernels, against float64.

The kernels read the experts in use once each. They multiply tiles of 8 or 32 rows of an expert;
the kernel for prompts multiplies 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from kernel_support import assert_norm_within, normal, packed
from quant_support import Matrix, Shape, filled, make_matrix
from torch import Tensor

from exl_core.formats.codecs.ggml.matrix import columns_of, layout_of
from exl_core.ops.backends.cuda.experts import CudaExperts, plan_loads
from exl_core.ops.backends.cuda.quantized import plan_tiles
from exl_core.ops.elementwise import ActivationKind, GateKind, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertLayer, ExpertMlp, Routed, Routing
from exl_core.ops.table import OpTable
from exl_core.ops.weights import GroupRun

BOUND = 3e-3
"""Two products with inputs rounded to float16, 3e-4 each, and the rounding of the activation."""

ROWS = (1, 2, 3, 5, 8, 9, 17, 33, 65, 300)


class Sizes(NamedTuple):
    """Shapes of gate and up, [inner, d], and of down, [d, inner], of the experts in turn."""

    wide: tuple[Shape, ...]
    narrow: tuple[Shape, ...]


def sizes(wide: Sequence[Shape], narrow: Sequence[Shape]) -> Sizes:
    inner, d = narrow[0].k, wide[0].k
    return Sizes(
        tuple(replace(one, n=inner) for one in wide), tuple(replace(one, n=d) for one in narrow)
    )


FORMS = {
    "4-bits": sizes([Shape(((4, 3, 128),), 0)], [Shape(((4, 2, 128),), 0)]),
    "groups-of-32": sizes([Shape(((4, 11, 32),), 0)], [Shape(((4, 7, 32),), 0)]),
    "no-multiple-of-32": sizes(
        [Shape(((4, 2, 75), (4, 1, 30)), 0, "zeros")], [Shape(((4, 1, 100), (4, 1, 7)), 0)]
    ),
    "permuted": sizes(
        [Shape(((5, 1, 32), (4, 3, 96)), 0, permuted=True)],
        [Shape(((6, 2, 64), (4, 2, 32)), 0, permuted=True)],
    ),
    "layouts-of-each": sizes(
        [
            Shape(((5, 2, 128), (3, 1, 64)), 0, permuted=True),
            Shape(((8, 1, 320),), 0, permuted=True),
            Shape(((2, 10, 32),), 0),
        ],
        [Shape(((4, 3, 64),), 0, permuted=True), Shape(((6, 2, 96),), 0), Shape(((3, 1, 192),), 0)],
    ),
    "padded-and-permuted": sizes(
        [Shape(((4, 3, 48),), 0, "minimums", permuted=True)],
        [Shape(((4, 2, 40),), 0, "zeros", torch.float32, permuted=True)],
    ),
    "mxfp4": sizes(
        [Shape(((4, 9, 32),), 0, "mxfp4", torch.uint8, has_bias=True)],
        [Shape(((4, 5, 32),), 0, "mxfp4", torch.uint8, has_bias=True)],
    ),
    "fp8": sizes(
        [Shape(((8, 2, 128),), 0, "e4m3", torch.float32)],
        [Shape(((8, 1, 128), (8, 1, 64)), 0, "e4m3", torch.float32)],
    ),
    "zeros": sizes(
        [Shape(((4, 3, 128),), 0, "zeros"), Shape(((4, 12, 32),), 0, "zeros")],
        [Shape(((8, 2, 128),), 0, "zeros"), Shape(((8, 8, 32),), 0, "zeros")],
    ),
    "minimums": sizes(
        [Shape(((4, 2, 128),), 0, "minimums"), Shape(((5, 8, 32),), 0, "minimums")],
        [
            Shape(((5, 3, 128),), 0, "minimums", torch.float32),
            Shape(((4, 12, 32),), 0, "minimums", torch.float32),
        ],
    ),
    "tables": sizes(
        [Shape(((4, 10, 32),), 0, "iq4_nl"), Shape(((4, 10, 32),), 0, "iq4_nl", torch.float32)],
        [Shape(((4, 2, 128),), 0, "iq4_nl"), Shape(((8, 8, 32),), 0, "e4m3", torch.float32)],
    ),
    "widths": sizes(
        [Shape(((2, 1, 128), (3, 5, 32)), 0), Shape(((6, 5, 32), (5, 1, 128)), 0)],
        [Shape(((8, 1, 128), (2, 7, 32)), 0), Shape(((3, 1, 128), (6, 1, 128), (8, 3, 32)), 0)],
    ),
}


class Experts:
    """Random experts, their exact weights on the GPU, and their packed form."""

    def __init__(self, table: OpTable, rng: torch.Generator, form: Sizes, count: int) -> None:
        self.device = table.device
        gate, up = (_scaled(rng, form.wide, count) for _ in range(2))
        down = _scaled(rng, form.narrow, count)
        self.d, self.inner = gate[0].layout.in_features, gate[0].layout.out_features
        self.exact = [
            [(one.weights().to(self.device), _bias(one, self.device)) for one in each]
            for each in (gate, up, down)
        ]
        pairs = zip(gate, up, strict=True)
        joined = [table.join([filled(table, a), filled(table, b)]) for a, b in pairs]
        self.gate_up = table.stack(joined)
        self.down = table.stack([filled(table, one) for one in down])

    def mlp(self, kind: GateKind = "silu") -> ExpertMlp:
        return ExpertMlp(self.gate_up, self.down, kind)

    def outputs(self, x: Tensor, routed: Routed, kind: GateKind = "silu") -> Tensor:
        """By the formula, in float64."""
        x = x.double().to(self.device)
        ids, weights = routed.ids.to(self.device), routed.weights.double().to(self.device)
        y = torch.zeros(len(x), self.d, dtype=torch.float64, device=self.device)
        for expert, parts in enumerate(zip(*self.exact, strict=True)):
            (gate, gate_bias), (up, up_bias), (down, down_bias) = parts
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            h = gated(x[rows] @ gate.T + gate_bias, x[rows] @ up.T + up_bias, kind)
            outer = (h @ down.T + down_bias) * weights[rows, slots, None]
            y.index_add_(0, rows, outer)
        return y.cpu()


def gated(gate: Tensor, up: Tensor, kind: GateKind) -> Tensor:
    if kind == "clamped_swiglu":
        gate, up = gate.clamp_max(7), up.clip(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def _scaled(rng: torch.Generator, shapes: Sequence[Shape], count: int) -> list[Matrix]:
    """Random matrices that about keep the magnitude of their inputs."""
    found = []
    for expert in range(count):
        matrix = make_matrix(rng, shapes[expert % len(shapes)])
        size = float(matrix.weights().std()) * matrix.layout.in_features**0.5
        if matrix.layout.formula == "mxfp4":
            steps = round(np.log2(size))
            found.append(replace(matrix, scales=matrix.scales - steps))
            continue
        offsets = matrix.offsets
        if offsets is not None and offsets.is_floating_point():
            offsets = (offsets / size).to(offsets.dtype)
        scales = (matrix.scales / size).to(matrix.scales.dtype)
        found.append(replace(matrix, scales=scales, offsets=offsets))
    return found


def _bias(matrix: Matrix, device: torch.device) -> Tensor:
    n = matrix.layout.out_features
    return (torch.zeros(n) if matrix.bias is None else matrix.bias).double().to(device)


def choice(rng: torch.Generator, rows: int, experts: int, top_k: int) -> Routed:
    """Skewed: low numbers are chosen more often, and some experts not at all."""
    chances = 1.0 / torch.arange(1, experts + 1, dtype=torch.float32)
    chances[experts // 2] = 0
    ids = torch.multinomial(chances.expand(rows, -1), top_k, generator=rng)
    return Routed(ids.int(), torch.rand(rows, top_k, generator=rng) + 0.1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_any_number_of_rows(
    gpu_table: OpTable, rng: torch.Generator, form: str, top_k: int
) -> None:
    experts = Experts(gpu_table, rng, FORMS[form], 13)
    for rows in ROWS:
        x, routed = normal(rng, rows, experts.d), choice(rng, rows, 13, top_k)
        got = gpu_table.expert_mlp(x, routed, experts.mlp())
        assert_norm_within(got, experts.outputs(x, routed), BOUND)


MANY_ROWS = {
    "zeros": sizes(
        [Shape(((4, 3, 128),), 0, "zeros", has_bias=True)],
        [Shape(((4, 3, 64),), 0, "minimums", torch.float32, has_bias=True)],
    ),
    "widths": sizes(
        [Shape(((8, 2, 128), (3, 1, 64)), 0)], [Shape(((6, 1, 128), (5, 1, 64), (2, 2, 32)), 0)]
    ),
    "groups-of-32": FORMS["groups-of-32"],
    "padded": sizes([Shape(((4, 2, 75), (4, 1, 30)), 0, "zeros")], [Shape(((4, 5, 128),), 0)]),
}
"""Experts that the kernel for prompts multiplies: also with a part of a tile of four panels."""


@pytest.mark.parametrize("form", MANY_ROWS)
@pytest.mark.parametrize("kind", ["silu", "clamped_swiglu"])
def test_prompts(
    gpu_table: OpTable,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    kind: GateKind,
) -> None:
    table = cast(Any, gpu_table).on_device
    gpu, calls = table._gpu, []

    def call(name: str, *operands: object) -> None:
        calls.append(name)
        type(gpu).call(gpu, name, *operands)

    monkeypatch.setattr(gpu, "call", call)
    is_for_prompts = torch.cuda.get_device_capability()[0] == 9 and not gpu.is_invariant
    experts = Experts(gpu_table, rng, MANY_ROWS[form], 5)
    for rows in (160, 500, 2000):
        x, routed = normal(rng, rows, experts.d), choice(rng, rows, 5, 2)
        calls.clear()
        got = gpu_table.expert_mlp(x, routed, experts.mlp(kind))
        assert_norm_within(got, experts.outputs(x, routed, kind), BOUND)
        assert ("expert_many_rows" in calls) == is_for_prompts
    # All rows with one expert, and repeated: the tiles of other launches leave nothing behind.
    routed = Routed(torch.full((2000, 1), 4, dtype=torch.int32), torch.rand(2000, 1, generator=rng))
    got = gpu_table.expert_mlp(x, routed, experts.mlp(kind))
    assert_norm_within(got, experts.outputs(x, routed, kind), BOUND)
    assert torch.equal(gpu_table.expert_mlp(x, routed, experts.mlp(kind)), got)


def test_prompts_without_a_gate(gpu_table: OpTable, rng: torch.Generator) -> None:
    sources = [
        _scaled(rng, (shape,), 4)
        for shape in (Shape(((4, 3, 128),), 160), Shape(((4, 5, 32),), 384))
    ]
    wide, narrow = ([filled(gpu_table, one) for one in each] for each in sources)
    mlp = ExpertMlp(gpu_table.stack(wide), gpu_table.stack(narrow), "relu2", is_gated=False)
    x, routed = normal(rng, 300, 384), choice(rng, 300, 4, 2)
    want = torch.zeros(300, 384, dtype=torch.float64)
    for expert, (up, down) in enumerate(zip(*sources, strict=True)):
        own, slots = (routed.ids == expert).nonzero(as_tuple=True)
        h = (x[own].double() @ up.weights().T).relu().square()
        weights = routed.weights[own, slots, None].double()
        want.index_add_(0, own, (h @ down.weights().T) * weights)
    assert_norm_within(gpu_table.expert_mlp(x, routed, mlp), want, BOUND)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("form", ["permuted", "mxfp4"])
def test_each_gate(gpu_table: OpTable, rng: torch.Generator, form: str, kind: GateKind) -> None:
    experts = Experts(gpu_table, rng, FORMS[form], 5)
    for rows in (1, 40):
        x, routed = 3 * normal(rng, rows, experts.d), choice(rng, rows, 5, 3)
        got = gpu_table.expert_mlp(x, routed, experts.mlp(kind))
        assert_norm_within(got, experts.outputs(x, routed, kind), BOUND)


@pytest.mark.parametrize("is_fused", [False, True], ids=["pair", "one-matrix"])
@pytest.mark.parametrize("inner", [96, 100], ids=["i96", "i100"])
def test_float16_experts(
    gpu_table: OpTable, rng: torch.Generator, inner: int, *, is_fused: bool
) -> None:
    if inner % 32 != 0 and not is_fused:
        pytest.skip("down is not grouped then, whatever the form of gate and up")
    count, d = 11, 160
    gate, up = ((normal(rng, count, inner, d) / d**0.5).half() for _ in range(2))
    down, bias = (normal(rng, count, d, inner) / inner**0.5).half(), normal(rng, count, d)
    if is_fused:
        both = torch.cat((gate, up), 1)
        wide = gpu_table.stack([packed(gpu_table, one) for one in both])
    else:
        pairs = zip(gate, up, strict=True)
        wide = gpu_table.stack(
            [gpu_table.join([packed(gpu_table, a), packed(gpu_table, b)]) for a, b in pairs]
        )
    narrow = gpu_table.stack(
        [packed(gpu_table, one, own) for one, own in zip(down, bias, strict=True)]
    )
    assert isinstance(wide, CudaExperts)
    assert isinstance(narrow, CudaExperts) == (inner % 32 == 0)
    for rows in ROWS:
        x, routed = normal(rng, rows, d), choice(rng, rows, count, 3)
        exact = torch.zeros(rows, d, dtype=torch.float64)
        for slot in range(3):
            e, xs = routed.ids[:, slot].long(), x.double()[..., None]
            h = gated((gate.double()[e] @ xs)[..., 0], (up.double()[e] @ xs)[..., 0], "silu")
            one = (down.double()[e] @ h[..., None])[..., 0] + bias.double()[e]
            exact += routed.weights[:, slot, None].double() * one
        got = gpu_table.expert_mlp(x, routed, ExpertMlp(wide, narrow, "silu"))
        assert_norm_within(got, exact, BOUND)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("form", [*FORMS, "float16"])
def test_experts_without_a_gate(
    gpu_table: OpTable, rng: torch.Generator, form: str, kind: ActivationKind
) -> None:
    count, top_k = 7, 3
    if form == "float16":
        up, down = [(normal(rng, count, *s) / s[1] ** 0.5).half() for s in ((96, 64), (64, 96))]
        exact = [[(one.double(), torch.zeros(len(one))) for one in each] for each in (up, down)]
        wide, narrow = ([packed(gpu_table, one) for one in each] for each in (up, down))
    else:
        sources = [_scaled(rng, shapes, count) for shapes in FORMS[form]]
        cpu = torch.device("cpu")
        exact = [[(one.weights(), _bias(one, cpu)) for one in each] for each in sources]
        wide, narrow = ([filled(gpu_table, one) for one in each] for each in sources)
    mlp = ExpertMlp(gpu_table.stack(wide), gpu_table.stack(narrow), kind, is_gated=False)
    assert isinstance(mlp.gate_up, CudaExperts)
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "relu2": lambda y: y.relu().square(),
    }
    for rows in ROWS:
        x, routed = normal(rng, rows, exact[0][0][0].shape[1]), choice(rng, rows, count, top_k)
        want = torch.zeros(x.shape, dtype=torch.float64)
        for expert, (first, second) in enumerate(zip(*exact, strict=True)):
            own, slots = (routed.ids == expert).nonzero(as_tuple=True)
            h = acts[str(kind)](x[own].double() @ first[0].T + first[1])
            outer = (h @ second[0].T + second[1]) * routed.weights[own, slots, None].double()
            want.index_add_(0, own, outer)
        assert_norm_within(gpu_table.expert_mlp(x, routed, mlp), want, BOUND)


@pytest.mark.parametrize("narrow_kind", ["Q6_K", "Q3_K", "Q2_K"])
@pytest.mark.parametrize("top_k", [1, 4])
def test_experts_with_small_groups(
    gpu_table: OpTable, rng: torch.Generator, narrow_kind: str, top_k: int
) -> None:
    """Types of GGUF whose groups have 16 rows, in `down` beside a Q3_K `gate_up`."""
    count, inner, d = 6, 256, 512
    gate, up = (_of_blocks(gpu_table, rng, "Q3_K", count, (inner, d)) for _ in range(2))
    down = _of_blocks(gpu_table, rng, narrow_kind, count, (d, inner))
    joined = [gpu_table.join([a, b]) for a, b in zip(gate[0], up[0], strict=True)]
    mlp = ExpertMlp(gpu_table.stack(joined), gpu_table.stack(down[0]), "silu")
    assert isinstance(mlp.gate_up, CudaExperts)
    assert mlp.gate_up.source == "small_groups"
    for rows in ROWS:
        x, routed = normal(rng, rows, d), choice(rng, rows, count, top_k)
        want = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(count):
            own, slots = (routed.ids == expert).nonzero(as_tuple=True)
            rows_of = x[own].double()
            h = gated(rows_of @ gate[1][expert].T, rows_of @ up[1][expert].T, "silu")
            weights = routed.weights[own, slots, None].double()
            want.index_add_(0, own, (h @ down[1][expert].T) * weights)
        assert_norm_within(gpu_table.expert_mlp(x, routed, mlp), want, BOUND)


def _of_blocks(
    table: OpTable, rng: torch.Generator, name: str, count: int, size: tuple[int, int]
) -> tuple[list[PackedLinear], list[Tensor]]:
    """Packed matrices of random blocks of a GGUF type, and their weights, float64."""
    kind, (n, k) = GGMLQuantizationType[name], size
    layout = layout_of(kind, n, k)
    assert layout is not None
    made, exact = [], []
    for _ in range(count):
        shape = (n, k // 256, GGML_QUANT_SIZES[kind][1])
        blocks = torch.randint(0, 256, shape, generator=rng).to(torch.uint8).numpy()
        for at in {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}[name]:
            scale = {"Q6_K": 2400, "Q3_K": 45, "Q2_K": 8}[name] * k**0.5
            blocks[:, :, at : at + 2] = np.array([1 / scale], np.float16).view(np.uint8)
        raw = blocks.reshape(n, -1)
        w = table.new_linear(layout)
        table.fill_linear(w, 0, columns_of(torch.from_numpy(raw), kind))
        made.append(w)
        exact.append(torch.from_numpy(dequantize(raw, kind)).double())
    return made, exact


@pytest.mark.parametrize("form", ["4-bits", "permuted", "padded-and-permuted", "mxfp4"])
def test_experts_are_added_after_their_norm(
    gpu_table: OpTable, rng: torch.Generator, form: str
) -> None:
    """Every row has all experts, so that no rounding changes a choice."""
    experts, count = Experts(gpu_table, rng, FORMS[form], 5), 5
    weight = (normal(rng, count, experts.d) / experts.d**0.5).half()
    w, gains = packed(gpu_table, weight, normal(rng, count)), 1 + 0.2 * normal(rng, experts.d)
    table = cast(Any, gpu_table).on_device
    norm = RmsNorm(gains.to(table.device), 1e-5)
    layer = ExpertLayer(norm, w, Routing(count), None, experts.mlp())
    for rows in ROWS:
        x = 3 * normal(rng, rows, experts.d)
        h = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * gains.double()
        routed = gpu_table.route(h.float(), w, Routing(count))
        added = experts.outputs(h.float(), routed)
        got = table.add_experts_(x.to(table.device), layer).cpu()
        assert_norm_within(got - x, added, BOUND)


def test_a_fused_norm_and_router_choose_the_same_for_a_row_in_every_batch(
    gpu_table: OpTable, rng: torch.Generator
) -> None:
    experts = Experts(gpu_table, rng, FORMS["4-bits"], 16)
    table = cast(Any, gpu_table).on_device
    w = packed(gpu_table, normal(rng, 16, experts.d))
    norm = RmsNorm(torch.ones(experts.d, device=table.device), 1e-6)
    layer = ExpertLayer(norm, w, Routing(4), None, experts.mlp())
    x = normal(rng, 64, experts.d).to(table.device)
    whole = table.add_experts_(x.clone(), layer)
    for first, last in ((0, 1), (1, 3), (3, 11), (20, 64)):
        assert torch.equal(table.add_experts_(x[first:last].clone(), layer), whole[first:last])


ROUTINGS = {
    "softmax": (16, Routing(4)),
    "one-of-three": (3, Routing(1, normalizes=False)),
    "all": (5, Routing(5)),
    "sigmoid": (128, Routing(8, "sigmoid", eps=1e-20, factor=1.5)),
    "groups": (160, Routing(6, groups=8, kept_groups=3)),
    "more-than-threads": (257, Routing(9, "sigmoid", factor=2.5)),
    "most": (70, Routing(32)),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("form", ["groups-of-32", "mxfp4", "permuted"])
def test_kernels_of_one_row_choose_as_the_router_does(
    gpu_table: OpTable, rng: torch.Generator, name: str, form: str
) -> None:
    """With one row, each thread block chooses for itself; with more, the router does."""
    count, routing = ROUTINGS[name]
    experts = Experts(gpu_table, rng, FORMS[form], count)
    table = cast(Any, gpu_table).on_device
    w = packed(gpu_table, normal(rng, count, experts.d) / experts.d**0.5, normal(rng, count))
    bias = normal(rng, count).to(table.device) if routing.scores == "sigmoid" else None
    gains = 1 + 0.2 * normal(rng, experts.d)
    norm = RmsNorm(gains.to(table.device), 1e-5)
    layer = ExpertLayer(norm, w, routing, bias, experts.mlp())
    x = 3 * normal(rng, 3, experts.d)
    whole = table.add_experts_(x.to(table.device), layer).cpu()
    for row in range(3):
        one = x[row : row + 1]
        got = table.add_experts_(one.to(table.device), layer).cpu()
        assert torch.equal(got, whole[row : row + 1])
        h = (one.double() * (one.double().square().mean() + 1e-5).rsqrt() * gains.double()).float()
        routed = gpu_table.route(h, w, routing, None if bias is None else bias.cpu())
        assert_norm_within(got - one, experts.outputs(h, routed), BOUND)


@pytest.mark.parametrize("rows", [7, 8, 31, 32, 33, 100])
def test_all_rows_with_the_last_expert(gpu_table: OpTable, rng: torch.Generator, rows: int) -> None:
    experts = Experts(gpu_table, rng, FORMS["permuted"], 9)
    x, weights = normal(rng, rows, experts.d), torch.rand(rows, 1, generator=rng)
    routed = Routed(torch.full((rows, 1), 8, dtype=torch.int32), weights)
    got = gpu_table.expert_mlp(x, routed, experts.mlp())
    assert_norm_within(got, experts.outputs(x, routed), BOUND)


def test_many_experts(gpu_table: OpTable, rng: torch.Generator) -> None:
    experts = Experts(gpu_table, rng, FORMS["groups-of-32"], 160)
    for rows in (1, 4, 64, 500):
        x, routed = normal(rng, rows, experts.d), choice(rng, rows, 160, 6)
        got = gpu_table.expert_mlp(x, routed, experts.mlp())
        assert_norm_within(got, experts.outputs(x, routed), BOUND)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_every_batch(
    gpu_table: OpTable, rng: torch.Generator, form: str
) -> None:
    experts = Experts(gpu_table, rng, FORMS[form], 6)
    x, routed = normal(rng, 70, experts.d), choice(rng, 70, 6, 2)
    whole = gpu_table.expert_mlp(x, routed, experts.mlp())
    for first, last in ((0, 1), (1, 8), (8, 45), (45, 70)):
        part = Routed(routed.ids[first:last], routed.weights[first:last])
        got = gpu_table.expert_mlp(x[first:last], part, experts.mlp())
        assert torch.equal(got, whole[first:last])


@pytest.mark.parametrize("form", ["4-bits", "layouts-of-each", "padded-and-permuted"])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_a_captured_graph_follows_the_choice(
    gpu_table: OpTable, rng: torch.Generator, rows: int, form: str
) -> None:
    """Router and experts in one graph, replayed with rows that choose other experts."""
    table = cast(Any, gpu_table).on_device
    experts = Experts(gpu_table, rng, FORMS[form], 16)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("d", [64, 67, 2880])
def test_routers_of_many_experts(
    gpu_table: OpTable, rng: torch.Generator, d: int, dtype: torch.dtype
) -> None:
    count, routing = 257, Routing(9, "sigmoid", eps=1e-20, factor=1.5)
    weight = (normal(rng, count, d) / d**0.5).half()
    bias, logit_bias = normal(rng, count), normal(rng, count)
    w = packed(gpu_table, weight, logit_bias)
    x = normal(rng, 90, d).to(dtype)
    scores = (x.double() @ weight.double().T + logit_bias.double()).sigmoid()
    for rows in (1, 3, 8, 9, 64, 90):
        got = gpu_table.route(x[:rows], w, routing, bias)
        ranked = scores[:rows] + bias.double()
        chosen = ranked.gather(1, got.ids.long())
        best = ranked.sort(1, descending=True).values[:, :9]
        assert_norm_within(chosen, best, 1e-3)
        weights = scores[:rows].gather(1, got.ids.long())
        exact = 1.5 * weights / weights.sum(1, keepdim=True)
        assert_norm_within(got.weights, exact, 1e-3)
        assert all(len(set(row)) == 9 for row in got.ids.tolist())


def test_a_router_chooses_the_same_for_a_row_in_every_batch(
    gpu_table: OpTable, rng: torch.Generator
) -> None:
    x, w = normal(rng, 64, 200), packed(gpu_table, normal(rng, 48, 200))
    whole = gpu_table.route(x, w, Routing(5))
    for first, last in ((0, 1), (1, 9), (20, 64)):
        part = gpu_table.route(x[first:last], w, Routing(5))
        assert torch.equal(part.ids, whole.ids[first:last])
        assert torch.equal(part.weights, whole.weights[first:last])


@pytest.mark.parametrize(
    "runs",
    [
        ((4, 5, 128),),
        ((4, 9, 32), (5, 3, 64)),
        ((3, 2, 100), (8, 1, 640), (2, 6, 32)),
        ((6, 1, 32), (4, 1, 300)),
    ],
)
def test_loads_cover_a_panel(runs: tuple[tuple[int, int, int], ...]) -> None:
    plan = plan_tiles(tuple(GroupRun(*run) for run in runs), 2, 1)
    loads = plan_loads(plan)
    assert loads["offset"][0] == plan.k_tiles["offset"][0]
    ends = loads["offset"].astype(int) + loads["bytes"]
    assert ends.tolist() == [*loads["offset"][1:].tolist(), plan.panel_bytes]
    assert (loads["blocks"] <= 4).all()
    assert (loads["blocks"] == loads["k_tiles"] * loads["k_tile_blocks"]).all()
    firsts = loads["first_block"].astype(int)
    assert (firsts + loads["blocks"]).tolist() == [*firsts[1:].tolist(), plan.num_blocks]
    assert (
        loads["bytes"]
        == loads["k_tiles"] * (96 + 128 * loads["bits"].astype(int) * loads["k_tile_blocks"])
    ).all()
