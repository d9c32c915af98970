"""Self-test: compares every op of a table with the reference; `exl doctor` shows the result.

Inputs are fixed, small and awkward (odd sizes, strided rows, pages out of order). The test takes
well under a second. Errors are relative to the largest value of the reference result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, HeadNorms, Scoring
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.ops.cache_rows import encode_rows, row_size
from exl_core.ops.elementwise import ActivationKind, GateKind, LayerNorm, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, PackedExperts, Routed, Routing
from exl_core.ops.rings import POSITIONS, STATES, new_bits
from exl_core.ops.table import OpTable
from exl_core.ops.weights import (
    DenseColumns,
    DenseLayout,
    GroupedColumns,
    GroupedLayout,
    GroupRun,
)

EPS = 2.0**-23


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Result of one case, which is an op, or an op on operands that its name adds: its largest
    error, and the bound that rounding alone can explain."""

    op: str
    passed: bool
    max_error: float
    bound: float


def run_selftest(table: OpTable) -> list[SelfTestResult]:
    """Runs all cases, even after a failure, and returns one result per case."""
    reference = ReferenceTable(1)
    results = []
    for op, (bound, case) in CASES.items():
        right = case(reference, torch.Generator().manual_seed(1))
        got = case(table, torch.Generator().manual_seed(1))
        error = max(_relative_error(a, b) for a, b in zip(got, right, strict=True))
        results.append(SelfTestResult(op, error <= bound, error, bound))
    return results


def _relative_error(got: Tensor, right: Tensor) -> float:
    if got.shape != right.shape:
        return float("inf")
    difference = (got.double() - right.double()).abs().max() / right.double().abs().max()
    return float(difference.nan_to_num(nan=torch.inf))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _linear(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    outputs = []
    for weight_type in (torch.float32, torch.float16, torch.bfloat16):
        w = table.new_linear(DenseLayout(37, 131, weight_type, has_bias=True))
        weight = _normal(generator, 37, 131).to(weight_type)
        table.fill_linear(w, 0, DenseColumns(weight, _normal(generator, 37)))
        outputs += [table.linear(_normal(generator, m, 135)[:, :131], w) for m in (1, 5, 40)]
    quantized = _quantized(table, generator)
    for m in (1, 5, 40):
        # Activations are -127, 0 or 127, which their rounding to integers represents exactly.
        x = 127 * torch.randint(-1, 2, (m, 120), generator=generator)
        outputs.append(table.linear(x.float(), quantized))
    floats = _floats(table, generator, 37, 96)
    for m in (1, 40):
        x = 127 * torch.randint(-1, 2, (m, 96), generator=generator)
        outputs.append(table.linear(x.float(), floats))
    return outputs


def _floats(
    table: OpTable, generator: torch.Generator, out_features: int, in_features: int
) -> PackedLinear:
    """A matrix of MXFP4 with a bias, whose outputs are about 1 for normally distributed inputs."""
    groups, rows = in_features // 32, in_features
    layout = GroupedLayout(
        *(out_features, in_features, (GroupRun(4, groups, 32),), None, torch.uint8, "mxfp4"),
        has_bias=True,
    )
    codes = torch.randint(0, 16, (rows, out_features), generator=generator).to(torch.uint8)
    exponents = torch.randint(121, 124, (groups, out_features), generator=generator)
    bias = torch.randint(-4, 5, (out_features,), generator=generator) / 8
    w = table.new_linear(layout)
    columns = GroupedColumns("bytes", codes, scales=exponents.to(torch.uint8), bias=bias)
    table.fill_linear(w, 0, columns)
    return w


def _quantized(table: OpTable, generator: torch.Generator) -> PackedLinear:
    """Two joined matrices of different bit width, in groups of 24 rows, with integer weights."""
    parts = []
    for bits in (3, 4):
        order = torch.randperm(120, generator=generator).int()
        layout = GroupedLayout(
            37, 120, (GroupRun(bits, 5, 24),), order, torch.float16, "zeros", has_bias=True
        )
        codes, zeros = (
            torch.randint(0, 2**bits, (rows, 37), generator=generator).to(torch.uint8)
            for rows in (120, 5)
        )
        bias = torch.randint(-9, 10, (37,), generator=generator).float()
        part = table.new_linear(layout)
        scales = torch.ones(5, 37, dtype=torch.float16)
        table.fill_linear(part, 0, GroupedColumns("bytes", codes, None, scales, zeros, bias))
        parts.append(part)
    return table.join(parts)


def _dense(table: OpTable, generator: torch.Generator) -> PackedLinear:
    """A dense linear whose outputs are about 1 for normally distributed inputs."""
    w = table.new_linear(DenseLayout(38, 131, torch.float16, has_bias=True))
    weight = (_normal(generator, 38, 131) / 11).half()
    table.fill_linear(w, 0, DenseColumns(weight, _normal(generator, 38)))
    return w


def _linear_add(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    residual = _normal(generator, 5, 38)
    table.linear_add_(_normal(generator, 5, 131), _dense(table, generator), residual)
    return [residual]


def _norm_linear(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    x, weight, bias = (_normal(generator, *shape) for shape in ((5, 131), (131,), (131,)))
    norms, w = (RmsNorm(weight, 1e-6), LayerNorm(weight, bias, 1e-6)), _dense(table, generator)
    return [table.norm_linear(x, norm, w) for norm in norms]


def _norm_gated_linear(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    x, norm = _normal(generator, 5, 131), _normal(generator, 131)
    y = table.norm_gated_linear(x, RmsNorm(norm, 1e-6), _dense(table, generator), "silu")
    return [cast(Tensor, y)]


def _norm_activated_linear(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    x, weight, bias = (_normal(generator, *shape) for shape in ((5, 131), (131,), (131,)))
    norm, w = LayerNorm(weight, bias, 1e-6), _dense(table, generator)
    return [cast(Tensor, table.norm_activated_linear(x, norm, w, "gelu_tanh"))]


def _embedding(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    w = table.new_linear(DenseLayout(37, 131, torch.float16))
    table.fill_linear(w, 0, DenseColumns(_normal(generator, 37, 131).half()))
    return [table.embedding(torch.tensor([36, 0, 17, 36]), w)]


def _rms_norm(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    return [table.rms_norm(_normal(generator, 5, 99), RmsNorm(_normal(generator, 99), 1e-6))]


def _layer_norm(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    weight, bias = _normal(generator, 99), _normal(generator, 99)
    return [table.layer_norm(_normal(generator, 5, 99), LayerNorm(weight, bias, 1e-6))]


def _activation(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    kinds: tuple[ActivationKind, ...] = ("silu", "gelu_tanh", "relu2")
    return [table.activation(_normal(generator, 5, 99), kind) for kind in kinds]


def _rms_norm_heads(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    x = _normal(generator, 5, 3 * 20 + 7)[:, :60].view(5, 3, 20)
    table.rms_norm_heads_(x, RmsNorm(_normal(generator, 20), 1e-6))
    return [x]


def _rope(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    x = _normal(generator, 5, 3 * 40)[:, :120].view(5, 3, 40)
    angle = 100 * _normal(generator, 5, 17)
    table.rope_(x, angle.cos(), angle.sin())
    return [x]


def _gated_activation(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    gate_up = 4 * _normal(generator, 5, 2 * 99)
    return [table.gated_activation(gate_up, kind) for kind in ("silu", "gelu_tanh")]


def _route(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    w = table.new_linear(DenseLayout(12, 131, torch.float32))
    table.fill_linear(w, 0, DenseColumns(_normal(generator, 12, 131)))
    x, bias = _normal(generator, 5, 131), _normal(generator, 12)
    by_softmax = table.route(x, w, Routing(3))
    by_sigmoid = table.route(x, w, Routing(3, "sigmoid", groups=3, kept_groups=2), bias)
    found = (by_softmax, by_sigmoid)
    return [tensor for one in found for tensor in (one.ids, one.weights)]


def _expert_mlp(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    def stacked(out_features: int, in_features: int) -> PackedExperts:
        experts = []
        for _ in range(5):
            weight = _normal(generator, out_features, in_features) / in_features**0.5
            experts.append(table.new_linear(DenseLayout(out_features, in_features, torch.float16)))
            table.fill_linear(experts[-1], 0, DenseColumns(weight.half()))
        return table.stack(experts)

    experts = ExpertMlp(stacked(2 * 37, 131), stacked(131, 37), "silu")
    ids = torch.tensor([[4, 0], [0, 1], [1, 0]], dtype=torch.int32)
    routed = Routed(ids, torch.rand(3, 2, generator=generator))
    return [table.expert_mlp(_normal(generator, 3, 131), routed, experts)]


def _coded_experts(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    def stacked(out_features: int, in_features: int) -> PackedExperts:
        return table.stack([_floats(table, generator, out_features, in_features) for _ in range(5)])

    outputs = []
    kinds: tuple[GateKind, ...] = ("silu", "clamped_swiglu")
    for kind in kinds:
        experts = ExpertMlp(stacked(2 * 64, 96), stacked(96, 64), kind)
        for m in (3, 40):
            ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(m)])
            routed = Routed(ids.int(), torch.rand(m, 2, generator=generator) / 8)
            x = torch.randint(-1, 2, (m, 96), generator=generator).float()
            outputs.append(table.expert_mlp(x, routed, experts))
    return outputs


def _log_sum_exp(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    return [table.log_sum_exp(8 * _normal(generator, 5, 199) + 3)]


PACKED_TYPES = (torch.int8, torch.uint8)  # cache types of keys and of values


def _write_kv(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    outputs = []
    for d, types in (
        (20, (torch.float16, torch.float16)),
        (20, (torch.float8_e4m3fn, torch.float8_e4m3fn)),
        (96, PACKED_TYPES),
    ):
        keys, values = (torch.zeros(3, 2, 8, row_size(kind, d), dtype=kind) for kind in types)
        key, value = _normal(generator, 4, 2, d), _normal(generator, 4, 2, d)
        table.write_kv(key, value, CacheLayer(keys, values), torch.tensor([23, 0, 9, 10]))
        outputs += [keys, values]
    return outputs


def _paged_attention(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    outputs = []
    row_starts = torch.tensor([0, 1, 1, 34], dtype=torch.int32)  # decode, no rows, prefill
    past_lens = torch.tensor([300, 0, 9], dtype=torch.int32)
    page_table = torch.tensor([[*range(20, 1, -1)], [0] * 19, [21, 1, 0] + [0] * 16])
    rows = AttentionRows(page_table.int(), row_starts, past_lens)
    for d, types in (
        (24, (torch.float16, torch.float16)),
        (24, (torch.float32, torch.float32)),
        (96, PACKED_TYPES),
    ):
        keys, values = (encode_rows(_normal(generator, 22, 2, 16, d), kind) for kind in types)
        cache = CacheLayer(keys, values)
        for scoring in (Scoring(d**-0.5), Scoring(d**-0.5, window=13, softcap=20.0)):
            q = _normal(generator, 34, 6, d)
            outputs.append(table.paged_attention(q, cache, rows, scoring))
            sinks = 2 * _normal(generator, 6)
            outputs.append(table.paged_attention(q, cache, rows, scoring, sinks=sinks))
    return outputs


def _attend(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    keys, values = (_normal(generator, 4, 2, 8, 20) for _ in range(2))
    angle = _normal(generator, 4, 7)
    batch = table.attention_batch(
        AttentionRows(
            torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
            torch.tensor([0, 1, 4], dtype=torch.int32),  # decode, prefill
            torch.tensor([11, 2], dtype=torch.int32),
        ),
        torch.tensor([11, 18, 19, 20]),
        angle.cos(),
        angle.sin(),
        num_pages=4,
        page_size=8,
    )
    qkv = _normal(generator, 4, 8 * 20 + 3)[:, :160]
    norms = HeadNorms(_normal(generator, 20), _normal(generator, 20), 1e-6)
    table.attend_(qkv, batch, CacheLayer(keys, values), Scoring(20**-0.5), norms=norms)
    with_sinks, sinks = _normal(generator, 4, 160), 2 * _normal(generator, 4)
    table.attend_(
        with_sinks, batch, CacheLayer(keys, values), Scoring(20**-0.5), norms=norms, sinks=sinks
    )
    return [qkv[:, :80], keys, values, with_sinks[:, :80]]


def _nearest_rings(table: OpTable, generator: torch.Generator) -> list[Tensor]:
    """Rings of 2 and 3 new bits in turn, from targets that are their values and a little noise. The
    reference does not search, which takes torch seconds: the rings are known."""
    new = torch.tensor(new_bits(2.5))
    values = _normal(generator, STATES)
    codes = torch.randint(0, 8, (2, POSITIONS), generator=generator) % (1 << new)
    rings, shift = torch.zeros_like(codes), torch.zeros_like(codes)
    for back in range(7):  # positions whose bits a state has
        rings |= codes.roll(back, 1) << shift
        shift = shift + new.roll(back)
    rings = rings % STATES
    if not isinstance(table, ReferenceTable):
        targets = values[rings] + 0.01 * _normal(generator, 2, POSITIONS)
        rings = table.nearest_rings(targets, values, 2.5).long()
    return [rings]


# Bounds. The error of a sum of k products of normal values is at most k roundings of values of its
# size, and about sqrt(k) roundings in practice. A quarter of the maximum is far above this noise
# and far below any real defect. With quantized experts, activations are rounded to 16-bit integers.
CASES: dict[str, tuple[float, Callable[[OpTable, torch.Generator], list[Tensor]]]] = {
    "linear": (32 * EPS, _linear),
    "linear_add_": (32 * EPS, _linear_add),
    "norm_linear": (32 * EPS, _norm_linear),
    "norm_gated_linear": (32 * EPS, _norm_gated_linear),
    "norm_activated_linear": (32 * EPS, _norm_activated_linear),
    "embedding": (0.0, _embedding),
    "rms_norm": (8 * EPS, _rms_norm),
    "rms_norm_heads_": (8 * EPS, _rms_norm_heads),
    "rope_": (4 * EPS, _rope),
    "layer_norm": (8 * EPS, _layer_norm),
    "activation": (8 * EPS, _activation),
    "gated_activation": (8 * EPS, _gated_activation),
    "route": (32 * EPS, _route),
    "expert_mlp": (64 * EPS, _expert_mlp),
    "expert_mlp of codes": (2.0**-14, _coded_experts),
    "log_sum_exp": (8 * EPS, _log_sum_exp),
    "write_kv": (0.0, _write_kv),
    "paged_attention": (32 * EPS, _paged_attention),
    "attend_": (32 * EPS, _attend),
    "nearest_rings": (0.0, _nearest_rings),
}
