"""The reference op table: plain torch, computed in float64. Every kernel is tested against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, dtype

from exl_core.ops.checks import OpInputError, check, check_contiguous, check_range
from exl_core.ops.quantized import QuantColumns, QuantLayout
from exl_core.ops.reference_attention import (
    F32,
    PlainBatch,
    Sequences,
    check_attention,
    gather,
    scale_heads_,
    split_heads,
)
from exl_core.ops.reference_cache import check_caches, store_rows
from exl_core.ops.reference_quantized import PlainQuantized, fill_quantized, new_quantized
from exl_core.ops.reference_sampling import log_sum_exp, sample, sample_rows
from exl_core.ops.table import AttentionBatch, GateKind, Inputs, PackedLinear, PreparedInputs

WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16)

if TYPE_CHECKING:
    from exl_core.ops.table import OpTable


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Dense weights in their original layout, [n, k]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def matrix(self) -> Tensor:
        return self.weight.double()


@dataclass(frozen=True, slots=True)
class PlainJoined:
    """Linears with the same input; their outputs are concatenated."""

    parts: tuple[PlainLinear | PlainQuantized, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def bias(self) -> Tensor | None:
        if all(part.bias is None for part in self.parts):
            return None
        return torch.cat(
            [torch.zeros(p.out_features) if p.bias is None else p.bias for p in self.parts]
        )

    def matrix(self) -> Tensor:
        return torch.cat([part.matrix() for part in self.parts])


class ReferenceTable:
    """Reference implementation of OpTable.

    `threads` is only stored: the number of torch's threads is a setting of the whole process.
    """

    name = "reference"
    device = torch.device("cpu")
    log_sum_exp = staticmethod(log_sum_exp)
    sample = staticmethod(sample)
    sample_rows = staticmethod(sample_rows)

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @staticmethod
    def bring(tensor: Tensor) -> Tensor:
        return tensor

    def activations(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns)

    def new_linear(
        self, out_features: int, in_features: int, dtype: dtype, has_bias: bool = False
    ) -> PackedLinear:
        if out_features < 1 or in_features < 1 or dtype not in WEIGHT_TYPES:
            raise OpInputError(f"PackedLinear: {out_features} x {in_features} of {dtype}")
        bias = torch.zeros(out_features) if has_bias else None
        return PlainLinear(torch.zeros(out_features, in_features, dtype=dtype), bias)

    def fill_linear(
        self, w: PackedLinear, row_offset: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        plain = _plain("fill_linear", w)
        if not isinstance(plain, PlainLinear):
            raise OpInputError("fill_linear: w (expected one of new_linear)")
        check("fill_linear", "weight", weight, (plain.weight.dtype,), None, w.in_features)
        check_contiguous("fill_linear", "weight", weight)
        rows = slice(row_offset, row_offset + weight.shape[0])
        if row_offset < 0 or rows.stop > w.out_features:
            raise OpInputError(
                f"fill_linear: row_offset (expected rows within [0, {w.out_features}), got"
                f" {weight.shape[0]} rows at {row_offset})"
            )
        if (bias is None) != (plain.bias is None):
            raise OpInputError("fill_linear: bias (expected one exactly if the linear has one)")
        plain.weight[rows] = weight
        if bias is not None and plain.bias is not None:
            check("fill_linear", "bias", bias, F32, weight.shape[0])
            plain.bias[rows] = bias

    def new_quantized(self, layout: QuantLayout) -> PackedLinear:
        return new_quantized(layout)

    def fill_quantized(self, w: PackedLinear, first_column: int, columns: QuantColumns) -> None:
        if not isinstance(w, PlainQuantized):
            raise OpInputError("fill_quantized: w (expected one of new_quantized)")
        fill_quantized(w, first_column, columns)

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        plain = [_plain("join", part) for part in parts]
        if len({part.in_features for part in plain}) != 1:
            raise OpInputError("join: parts (expected some, of equal in_features)")
        flat = [
            inner
            for part in plain
            for inner in (part.parts if isinstance(part, PlainJoined) else (part,))
        ]
        return PlainJoined(tuple(flat))

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        return _linear("linear", x, w).float()

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Tensor:  # noqa: ARG002
        return plain

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> None:
        y = _linear("linear_add_", cast(Tensor, x), w)
        check("linear_add_", "residual", residual, F32, *y.shape)
        check_contiguous("linear_add_", "residual", residual)
        residual.copy_(residual + y)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        return _copy_to("norm_linear", _norm_linear("norm_linear", x, norm, eps, w), out)

    def norm_gated_linear(  # noqa: PLR0917 - two ops' operands
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        w: PackedLinear,
        kind: GateKind,
        out: Inputs | None = None,
    ) -> Tensor:
        op = "norm_gated_linear"
        if w.out_features % 2 != 0:
            raise OpInputError(f"{op}: w ({w.out_features} are no two halves)")
        y = self.gated_activation(_norm_linear(op, x, norm, eps, w), kind)
        return _copy_to(op, y, cast(Tensor | None, out))

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        check("embedding", "token_ids", token_ids, (torch.int64,), None)
        check_contiguous("embedding", "token_ids", token_ids)
        check_range("embedding", "token_ids", token_ids, w.out_features)
        return _plain("embedding", w).matrix()[token_ids].float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        check("rms_norm", "x", x, F32, None, None)
        check_contiguous("rms_norm", "x", x, 1)
        check("rms_norm", "weight", weight, F32, x.shape[1])
        return _rms_norm(x, weight, eps)

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        check("rms_norm_heads_", "x", x, F32, None, None, None)
        check_contiguous("rms_norm_heads_", "x", x, 1)
        check("rms_norm_heads_", "weight", weight, F32, x.shape[2])
        x.copy_(_rms_norm(x, weight, eps))

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        check("rope_", "x", x, F32, None, None, None)
        check_contiguous("rope_", "x", x, 1)
        check("rope_", "cos", cos, F32, x.shape[0], None)
        check("rope_", "sin", sin, F32, x.shape[0], cos.shape[1])
        check_contiguous("rope_", "cos", cos)
        check_contiguous("rope_", "sin", sin)
        half = cos.shape[1]
        if 2 * half > x.shape[2]:
            raise OpInputError(f"rope_: cos (expected at most {x.shape[2] // 2} pairs, got {half})")
        a = x[..., :half].double()
        b = x[..., half : 2 * half].double()
        c = cos[:, None].double()  # [rows, 1, half]
        s = sin[:, None].double()
        x[..., :half] = a * c - b * s
        x[..., half : 2 * half] = b * c + a * s

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        check("gated_activation", "gate_up", gate_up, F32, None, None)
        check_contiguous("gated_activation", "gate_up", gate_up, 1)
        if gate_up.shape[1] % 2 != 0 or kind not in ("silu", "gelu_tanh"):
            raise OpInputError(f"gated_activation: {kind} of rows of {gate_up.shape[1]} values")
        gate, up = gate_up.double().chunk(2, dim=1)
        if kind == "silu":
            active = torch.nn.functional.silu(gate)
        else:
            # 0.5 x (1 + tanh u) = x sigmoid(2u), which does not cancel for negative x.
            u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            active = gate * torch.sigmoid(2 * u)
        return (active * up).float()

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> None:
        check("write_kv", "key", key, F32, None, None, None)
        check("write_kv", "value", value, F32, *key.shape)
        check_contiguous("write_kv", "key", key, 1)
        check_contiguous("write_kv", "value", value, 1)
        rows, heads, d = key.shape
        check_caches("write_kv", key_cache, value_cache, (None, heads, None), d)
        check("write_kv", "slots", slots, (torch.int64,), rows)
        page_size = key_cache.shape[2]
        check_range("write_kv", "slots", slots, key_cache.shape[0] * page_size)
        page, offset = slots // page_size, slots % page_size
        store_rows(key_cache, page, offset, key)
        store_rows(value_cache, page, offset, value)

    def attention_batch(  # noqa: PLR0917 - the parts of a batch
        self,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        num_pages: int,
        page_size: int,
    ) -> AttentionBatch:
        op = "attention_batch"
        if num_pages < 1 or page_size < 1:
            raise OpInputError(f"{op}: page_size ({num_pages} pages of {page_size})")
        check(op, "slots", slots, (torch.int64,), None)
        check_contiguous(op, "slots", slots)
        check_range(op, "slots", slots, num_pages * page_size)
        sequences = Sequences(page_table, row_starts, past_lens)
        sequences.check(op, slots.shape[0], page_size, num_pages)
        check(op, "cos", cos, F32, slots.shape[0], None)
        check(op, "sin", sin, F32, *cos.shape)
        check_contiguous(op, "cos", cos)
        check_contiguous(op, "sin", sin)
        return PlainBatch(sequences, slots, cos, sin, num_pages, page_size)

    def attend_(  # noqa: PLR0917 - the op's operands
        self,
        qkv: Tensor,
        batch: AttentionBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        head_scale: Tensor | None = None,
        head_shift: Tensor | None = None,
        out: PreparedInputs | None = None,  # noqa: ARG002 - this table never makes one
    ) -> None:
        if not isinstance(batch, PlainBatch):
            raise OpInputError("attend_: batch (expected one of the reference table)")
        q, k, v = split_heads(qkv, batch, key_cache, value_cache)
        for norm, heads in ((q_norm, q), (k_norm, k)):
            if norm is not None:
                self.rms_norm_heads_(heads, norm, eps)
        self.rope_(q, batch.cos, batch.sin)
        self.rope_(k, batch.cos, batch.sin)
        scale_heads_(q, k, head_scale, head_shift)
        self.write_kv(k, v, key_cache, value_cache, batch.slots)
        mixed = self.paged_attention(
            q, key_cache, value_cache, *batch.sequences, scale=scale, window=window, softcap=softcap
        )
        q.copy_(mixed.view(q.shape))

    def paged_attention(  # noqa: PLR0917 - the op's operands
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        check_attention(q, key_cache, value_cache, Sequences(page_table, row_starts, past_lens))
        if window < 0 or not softcap >= 0.0:
            raise OpInputError(f"paged_attention: window {window} and softcap {softcap}")
        rows, heads, d = q.shape
        out = torch.empty(rows, heads, d)
        for seq in range(page_table.shape[0]):
            first, last = int(row_starts[seq]), int(row_starts[seq + 1])
            past = int(past_lens[seq])
            if first == last:
                continue
            end = past + last - first
            group = heads // key_cache.shape[1]
            keys = gather(key_cache, page_table[seq], end).repeat_interleave(group, dim=0)
            values = gather(value_cache, page_table[seq], end).repeat_interleave(group, dim=0)
            queries = q[first:last].double().transpose(0, 1)  # [heads, rows, d]
            scores = queries @ keys.transpose(1, 2) * scale  # [heads, rows, end]
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(past, end)[:, None]
            key = torch.arange(end)
            seen = key <= position
            if window > 0:
                seen &= key > position - window
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            # Values that no row attends to may hold NaN, and 0 * NaN is not 0.
            values = values.masked_fill(~seen.any(0)[None, :, None], 0.0)
            out[first:last] = (weights @ values).transpose(0, 1)
        return out.view(rows, heads * d)


def _plain(op: str, w: PackedLinear) -> PlainLinear | PlainQuantized | PlainJoined:
    if not isinstance(w, PlainLinear | PlainQuantized | PlainJoined):
        raise OpInputError(f"{op}: w (expected a linear of the reference table)")
    return w


def _linear(op: str, x: Tensor, w: PackedLinear) -> Tensor:
    """x @ w, float64."""
    plain = _plain(op, w)
    check(op, "x", x, F32, None, w.in_features)
    check_contiguous(op, "x", x, 1)
    y = x.double() @ plain.matrix().T
    return y if plain.bias is None else y + plain.bias


def _copy_to(op: str, result: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result
    check(op, "out", out, F32, *result.shape)
    check_contiguous(op, "out", out)
    return out.copy_(result)


def _norm_linear(op: str, x: Tensor, norm: Tensor, eps: float, w: PackedLinear) -> Tensor:
    check(op, "x", x, F32, None, w.in_features)
    check_contiguous(op, "x", x, 1)
    check(op, "norm", norm, F32, w.in_features)
    check_contiguous(op, "norm", norm)
    return _linear(op, _rms_norm(x, norm, eps), w).float()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * factor * weight.double()).float()


if TYPE_CHECKING:

    def _is_an_op_table(table: ReferenceTable) -> OpTable:
        return table
