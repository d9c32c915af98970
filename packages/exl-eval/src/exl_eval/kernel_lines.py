"""Bytes and operations of one call of an op, from its operands.

Bytes are those that must be moved: packed weights, inputs, outputs, the keys and values that are
attended to, and recurrent states. Operations are multiplications and additions of products with
matrices, of attention, and of recurrent states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.ops.attention import CacheLayer, Scoring
from exl_core.ops.cache_rows import head_dim_of
from exl_core.ops.elementwise import LayerNorm, RmsNorm
from exl_core.ops.moe import ExpertMlp

MATRIX_OPERAND = {
    "embedding": 1,
    "linear": 1,
    "linear_add_": 1,
    "norm_linear": 2,
    "norm_gated_linear": 2,
    "norm_activated_linear": 2,
    "route": 1,
}
"""Index of the packed matrix among each op's operands."""

STATE_OPERATIONS = {"causal_conv": 2, "delta_rule": 7, "state_scan": 5}
"""Operations of each recurrent op for each number of a sequence's state and each token: two for a
product that is added to a sum, one for a decay. For a convolution, of its taps."""

COUNTED_OPS = (
    *MATRIX_OPERAND,
    *STATE_OPERATIONS,
    *("activation", "add_", "add_experts_", "attend_", "attend_latent", "expert_mlp"),
    *("gate_heads", "gated_activation", "layer_norm", "rms_norm", "rms_norm_heads_", "rope_"),
)
"""Ops that a pass calls; `attend_`, `attend_latent` and `add_experts_` include others."""


@dataclass(frozen=True, slots=True)
class Pass:
    """`batch` sequences, each with `rows` new tokens after `past_len` cached ones."""

    kv_format: KVFormat
    batch: int
    rows: int
    past_len: int


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call of an op; `again` repeats it."""

    op: str
    operands: tuple[Any, ...]
    result: Any
    again: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Line:
    """Key of calls that are counted together: same op, shape, bytes and operations."""

    op: str
    shape: str
    bytes: int
    operations: int


def line_of(call: Call, this: Pass) -> Line:
    """The line of a call in `this` pass."""
    special = _SPECIAL.get(call.op)
    if special is not None:
        return special(call, this)
    tensors = [
        one.weight if isinstance(one, RmsNorm | LayerNorm) else one
        for one in call.operands
        if isinstance(one, Tensor | RmsNorm | LayerNorm)
    ]
    if isinstance(call.result, Tensor) and all(call.result is not one for one in tensors):
        tensors.append(call.result)
    moved = sum(map(_size, tensors))
    if call.op.endswith("_"):  # read and written
        moved += _size(tensors[-1] if call.op == "linear_add_" else tensors[0])
    if call.op not in MATRIX_OPERAND:
        return Line(call.op, " x ".join(map(str, tensors[0].shape)), moved, 0)
    rows, matrix = tensors[0].shape[0], call.operands[MATRIX_OPERAND[call.op]]
    inputs, outputs = matrix.in_features, matrix.out_features
    if call.op == "embedding":  # reads only the rows of the given tokens
        return Line(
            call.op, f"{outputs} x {inputs}", moved + rows * matrix.size_bytes // outputs, 0
        )
    shape, operations = f"{inputs} -> {outputs}", 2 * rows * inputs * outputs
    return Line(call.op, shape, moved + matrix.size_bytes, operations)


def _attention_line(call: Call, this: Pass) -> Line:
    """Attention to keys and values. Each row writes one key and one value."""
    qkv, _, cache, scoring = call.operands[:4]
    head_dim = head_dim_of(cache.keys)
    width = qkv.shape[1] - cache.heads_per_row * head_dim  # of the queries
    queries = this.batch * this.rows * width * qkv.element_size()
    held, seen, cached = _cached(cache, scoring, this)
    operations = 4 * this.batch * seen * width
    shape = f"{width // head_dim} heads of {head_dim}, {held} keys"
    return Line(call.op, shape, _size(qkv) + queries + cached, operations)


def _latent_line(call: Call, this: Pass) -> Line:
    """Latent attention in its absorbed form: products of each head with the cached rows, and with
    its own matrices before and after them."""
    q, latent, key, up, _, cache, scoring, *_ = call.operands
    is_tensor = isinstance(call.result, Tensor)
    value = call.result.shape[1] if is_tensor else call.result.features
    moved = sum(map(_size, (q, latent, key))) + up.size_bytes
    moved += _size(call.result) if is_tensor else 2 * len(q) * value
    held, seen, cached = _cached(cache, scoring, this)
    rank, width = latent.shape[1], latent.shape[1] + key.shape[1]
    heads = up.keys.num_heads
    inner = q.shape[1] - heads * key.shape[1] + value  # without RoPE, and of values
    operations = 2 * this.batch * seen * heads * (width + rank) + 2 * len(q) * inner * rank
    shape = f"{heads} heads, rows of {width}, {held} keys"
    return Line(call.op, shape, moved + cached, operations)


def _cached(cache: CacheLayer, scoring: Scoring, this: Pass) -> tuple[int, int, int]:
    """Positions that the rows of a sequence see, positions that each of them sees, added up, and
    the bytes of all sequences: those that are seen are read once, and each row is written."""
    window = scoring.window
    ends = [this.past_len + row + 1 for row in range(this.rows)]
    seen = sum(min(end, window) if window else end for end in ends)
    held = min(ends[-1], window + this.rows - 1) if window else ends[-1]
    row = this.kv_format.bytes_per_head(head_dim_of(cache.keys), is_shared=cache.is_shared)
    return held, seen, this.batch * (held + this.rows) * cache.keys.shape[1] * row


def _recurrent_line(call: Call, this: Pass) -> Line:
    """A recurrent op. The states of the sequences are read, unless they are new, and written."""
    *operands, states, _ = call.operands[:5]
    conv = call.operands[5] if len(call.operands) > 5 else None  # of the inputs, in the same kernel
    tensors = [one for one in operands if isinstance(one, Tensor)]
    moved = sum(map(_size, (*tensors, call.result)))
    moved += this.batch * _size(states[0]) * (2 if this.past_len else 1)
    numbers, sizes = states[0].numel(), list(states.shape[1:])
    if call.op == "causal_conv":
        taps = operands[1].weight
        moved, numbers, sizes = moved + _size(taps), taps.numel(), list(taps.shape)
    operations = STATE_OPERATIONS[call.op] * len(tensors[0]) * numbers
    if conv is not None:
        held, taps = conv.states[0], conv.taps.weight
        moved += _size(taps) + this.batch * _size(held) * (2 if this.past_len else 1)
        operations += STATE_OPERATIONS["causal_conv"] * len(tensors[0]) * taps.numel()
    return Line(call.op, " x ".join(map(str, sizes)), moved, operations)


def _experts_line(call: Call, this: Pass) -> Line:  # noqa: ARG001 - as the others
    """Experts of all rows. Of their matrices the part is read that rows are expected to choose
    (`Transformer.pass_weight_bytes`), so that layers whose choices differ form one line."""
    x, routed, experts = call.operands
    moved = sum(map(_size, (x, routed.ids, routed.weights, call.result)))
    return _line_of_experts(call.op, experts, x, routed.ids.shape[1], moved)


def _expert_layer_line(call: Call, this: Pass) -> Line:  # noqa: ARG001 - as the others
    """A norm, a router and the experts, whose outputs are added."""
    x, layer = call.operands
    router, norm = layer.router, layer.norm.weight
    moved = 2 * _size(x) + _size(norm) + router.size_bytes
    line = _line_of_experts(call.op, layer.experts, x, layer.routing.top_k, moved)
    operations = line.operations + 2 * len(x) * router.in_features * router.out_features
    if layer.joined is None:
        return replace(line, operations=operations)
    parts = layer.joined.shared / layer.experts.down.num_experts
    sizes = (layer.experts.gate_up, layer.experts.down)
    read = round(parts * sum(one.size_bytes for one in sizes))
    each = sum(one.in_features * one.out_features for one in sizes)
    operations += 2 * len(x) * layer.joined.shared * each
    return replace(line, bytes=line.bytes + read, operations=operations)


def _line_of_experts(op: str, experts: ExpertMlp, x: Tensor, top_k: int, moved: int) -> Line:
    """`moved`: bytes other than those of the experts' matrices."""
    matrices = experts.gate_up, experts.down
    count, rows = experts.down.num_experts, len(x)
    read = (1.0 - (1.0 - top_k / count) ** rows) * sum(one.size_bytes for one in matrices)
    each = sum(one.in_features * one.out_features for one in matrices)
    shape = f"{top_k} of {count}, {x.shape[1]} -> {experts.down.in_features}"
    return Line(op, shape, moved + round(read), 2 * rows * top_k * each)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_SPECIAL: dict[str, Callable[[Call, Pass], Line]] = {
    "attend_": _attention_line,
    "attend_latent": _latent_line,
    "expert_mlp": _experts_line,
    "add_experts_": _expert_layer_line,
    **dict.fromkeys(STATE_OPERATIONS, _recurrent_line),
}
"""Ops whose bytes or operations do not follow from the sizes of their operands alone."""
