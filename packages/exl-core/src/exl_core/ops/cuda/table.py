"""The op table of one GPU: allocates outputs with torch and calls the kernels.

The ops of a forward pass do not synchronize the host with the GPU, except `sample_rows`, which
returns tokens. Operands are not checked here: the caller that builds a batch checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from exl_core.ops.checks import OpInputError
from exl_core.ops.cuda.attention import Attention, CudaBatch, Scoring
from exl_core.ops.cuda.library import TYPES, Gpu
from exl_core.ops.cuda.linear import CudaInputs, CudaJoined, Linears, Norm, parts_of
from exl_core.ops.cuda.quantized import CudaQuantLinear
from exl_core.ops.cuda.sampling import RowSampler
from exl_core.ops.cuda.upload import upload
from exl_core.ops.native import NativeTable
from exl_core.ops.quantized import QuantColumns, QuantLayout
from exl_core.ops.table import (
    AttentionBatch,
    GateKind,
    Inputs,
    NextStep,
    PackedLinear,
    PreparedInputs,
    RowSettings,
    Sampled,
)
from exl_kernels import cuda

if TYPE_CHECKING:
    from exl_core.ops.table import OpTable


LOG_SUM_VALUES = 1 << 24  # number of logits that `log_sum_exp` processes at a time


class CudaTable:
    """OpTable of one GPU. `threads` is the number of threads that fill matrices."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.threads = threads
        self._gpu = Gpu(device)
        self._linears = Linears(self._gpu)
        self._attention = Attention(self._gpu)
        self._row_sampler = RowSampler(self._gpu)
        self.sample = NativeTable(None, threads=1).sample

    @property
    def name(self) -> str:
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"cuda-{major}.{minor}"

    def bring(self, tensor: Tensor) -> Tensor:
        return upload(tensor, self.device)

    def activations(self, rows: int, columns: int) -> Tensor:
        return self._gpu.empty(rows, columns, dtype=torch.float16)

    def new_linear(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,  # noqa: ARG002 - stored as float16
        has_bias: bool = False,
    ) -> PackedLinear:
        return self._linears.new_dense(out_features, in_features, has_bias)

    def fill_linear(
        self, w: PackedLinear, row_offset: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        self._linears.fill_dense(w, row_offset, weight, bias)

    def new_quantized(self, layout: QuantLayout) -> PackedLinear:
        return self._linears.new_quantized(layout)

    def fill_quantized(self, w: PackedLinear, first_column: int, columns: QuantColumns) -> None:
        self._linears.fill_quantized(w, first_column, columns)

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        return CudaJoined(tuple(part for w in parts for part in parts_of(w)))

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        out = self._gpu.empty(x.shape[0], w.out_features)
        self._linears.multiply(x, w, out)
        return out

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:
        return self._linears.inputs_for(w, plain.shape[0]) or plain

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> None:
        if isinstance(x, CudaInputs):
            self._linears.multiply_prepared(x, residual)
            return
        x = cast(Tensor, x)
        self._linears.multiply(x, w, residual, is_added=True)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = self._gpu.empty(x.shape[0], w.out_features)
        self._linears.multiply(x, w, out, norm=Norm(norm, eps))
        return out

    def norm_gated_linear(  # noqa: PLR0917 - two ops' operands
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        w: PackedLinear,
        kind: GateKind,
        out: Inputs | None = None,
    ) -> Tensor:
        if isinstance(out, CudaInputs):
            self._linears.multiply_gated(x, w, out, Norm(norm, eps), kind)
            return out.memory
        to = self._gpu.empty(x.shape[0], w.out_features // 2) if out is None else cast(Tensor, out)
        self._linears.multiply_gated(x, w, to, Norm(norm, eps), kind)
        return to

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        rows = token_ids.shape[0]
        out = self._gpu.empty(rows, w.in_features)
        (part,) = parts_of(w)
        if rows == 0:
            return out
        ids, to = token_ids.data_ptr(), out.data_ptr()
        if isinstance(part, CudaQuantLinear):
            self._gpu.call("quant_embedding", part.matrix, ids, rows, to)
        else:
            weight = part.weight
            source = weight.data_ptr(), TYPES[weight.dtype]
            self._gpu.call("embedding", *source, ids, rows, w.in_features, to)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, columns = x.shape
        out = self._gpu.empty(rows, columns)
        if rows:
            source = x.data_ptr(), TYPES[x.dtype], x.stride(0), weight.data_ptr(), eps
            target = out.data_ptr(), TYPES[out.dtype], out.stride(0)
            self._gpu.call("rms_norm", *source, rows, columns, *target)
        return out

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        if x.numel():
            operands = x.data_ptr(), TYPES[x.dtype], x.stride(0), weight.data_ptr(), eps
            self._gpu.call("rms_norm_heads", *operands, *x.shape)

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        if x.numel():
            operands = x.data_ptr(), TYPES[x.dtype], x.stride(0), cos.data_ptr(), sin.data_ptr()
            self._gpu.call("rope", *operands, cos.shape[1], *x.shape)

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        out = self._gpu.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._linears.gate(gate_up, kind, out)
        return out

    def log_sum_exp(self, x: Tensor) -> Tensor:
        rows = max(1, LOG_SUM_VALUES // max(1, x.shape[1]))  # torch makes a float32 copy
        return torch.cat([part.float().logsumexp(1) for part in torch.split(x, rows)])

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> None:
        if key.shape[0] and (key.stride(0) != value.stride(0) or key.dtype is not value.dtype):
            raise OpInputError("write_kv: key and value (expected rows laid out alike)")
        self._attention.write(key, value, key_cache, value_cache, slots)

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
        rows, heads, head_dim = q.shape
        out = self._gpu.empty(rows, heads * head_dim, dtype=q.dtype)
        none = self._gpu.empty(0)
        batch = self._attention.bind(page_table, row_starts, past_lens, none, none, none)
        scoring = Scoring(scale, window, softcap)
        if rows:
            self._attention.paged_attention(q, out, heads, batch, key_cache, value_cache, scoring)
        return out

    def attention_batch(  # noqa: PLR0917 - what a batch is made of
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
        self._linears.begin_pass()  # a pass starts with this op
        if page_table.is_cuda:
            rows, (seqs, pages) = slots.shape[0], page_table.shape
            most = 1 if rows == seqs else rows, pages * page_size
            return CudaBatch(page_table, row_starts, past_lens, slots, cos, sin, *most)
        if page_table.numel() and int(page_table.amax()) >= num_pages:
            raise OpInputError(
                f"attention_batch: page_table (expected ids within [0, {num_pages}))"
            )
        return self._attention.bind(page_table, row_starts, past_lens, slots, cos, sin)

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
        out: PreparedInputs | None = None,
    ) -> None:
        if qkv.shape[0] == 0:
            return
        to, bound = cast(CudaInputs | None, out), cast(CudaBatch, batch)
        writes_to_out = to is not None and bound.can_permute_output
        self._attention.attend(
            qkv,
            bound,
            key_cache,
            value_cache,
            (q_norm, k_norm),
            eps,
            Scoring(scale, window, softcap),
            (head_scale, head_shift),
            to if writes_to_out else None,
        )
        if to is not None and not writes_to_out:
            self._linears.prepare_for(to, qkv[:, : to.features])

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        on_gpu = [settings for settings in rows if settings.num_top <= cuda.MAX_TOP]
        if len(on_gpu) == len(rows):
            return self._row_sampler.draw(logits, rows, next_step)
        drawn = iter(self._row_sampler.draw(logits, on_gpu))
        all_drawn = [
            next(drawn)
            if settings.num_top <= cuda.MAX_TOP
            else settings.draw(self.sample, logits[settings.row].cpu())
            for settings in rows
        ]
        if next_step is not None:
            next_step.launch_after(all_drawn)
        return all_drawn


if TYPE_CHECKING:

    def _is_an_op_table(table: CudaTable) -> OpTable:
        return table
