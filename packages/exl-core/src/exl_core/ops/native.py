"""The compiled CPU ops: allocates outputs and passes tensors to the extension `exl_kernels`.

Inside exl_core only this module calls the extension. `ops/cuda/` imports `exl_kernels.cuda`, the
module of the CUDA library. The kernels check their operands (exl_kernels.InputError is a
ValueError) and release the GIL while they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, dtype

from exl_core.errors import BackendError
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

KERNELS_VERSION = "0.1.0"
INSTALL = "Install it with: python -m pip install ./csrc (from the repository's root)."

try:
    import exl_kernels
except ImportError as error:
    # A missing and a broken library both raise ImportError; the loader's message names the cause.
    raise BackendError(
        f"the kernel library cannot be loaded: {error}",
        where="exl_kernels",
        expected=f"version {KERNELS_VERSION}",
        next_step=INSTALL,
    ) from error

if exl_kernels.__version__ != KERNELS_VERSION:
    raise BackendError(
        "the kernel library does not match this exl-core",
        where=exl_kernels.__file__,
        expected=f"version {KERNELS_VERSION}",
        got=exl_kernels.__version__,
        next_step=INSTALL,
    )

if TYPE_CHECKING:
    from exl_core.ops.table import OpTable


def native_isas() -> tuple[str, ...]:
    """Instruction sets that both the kernels and the processor support, slowest first."""
    return exl_kernels.available_isas()


class NativeTable:
    """OpTable of the CPU kernels for one instruction set, with their thread pool."""

    device = torch.device("cpu")

    def __init__(self, isa: str | None, threads: int) -> None:
        isas = native_isas()
        if isa is not None and isa not in isas:
            raise BackendError(
                "this machine or build lacks the instruction set",
                expected=" or ".join(isas),
                got=isa,
            )
        self._ops = exl_kernels.Table(isa or isas[-1], threads)

    @property
    def name(self) -> str:
        return f"cpu-{self._ops.isa}"

    @property
    def threads(self) -> int:
        return self._ops.threads

    @staticmethod
    def bring(tensor: Tensor) -> Tensor:
        return tensor

    def activations(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns)

    def new_linear(
        self, out_features: int, in_features: int, dtype: dtype, has_bias: bool = False
    ) -> PackedLinear:
        return exl_kernels.PackedLinear(out_features, in_features, dtype, has_bias)

    def fill_linear(
        self, w: PackedLinear, row_offset: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        cast(exl_kernels.PackedLinear, w).fill(row_offset, weight, bias)

    def new_quantized(self, layout: QuantLayout) -> PackedLinear:
        return exl_kernels.QuantLinear(
            layout.out_features,
            layout.in_features,
            layout.runs,
            layout.features,
            layout.scale_dtype,
            layout.offset,
            layout.has_bias,
        )

    def fill_quantized(self, w: PackedLinear, first_column: int, columns: QuantColumns) -> None:
        cast(exl_kernels.QuantLinear, w).fill(
            first_column,
            columns.packing,
            columns.codes,
            columns.source_rows,
            columns.scales,
            columns.offsets,
            columns.bias,
        )

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        return exl_kernels.JoinedLinear([cast(exl_kernels.Linear, part) for part in parts])

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        out = torch.empty(x.shape[0], w.out_features, dtype=torch.float32)
        self._ops.linear(x, cast(exl_kernels.Linear, w), out)
        return out

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Tensor:  # noqa: ARG002
        return plain

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> None:
        self._ops.linear_add_(cast(Tensor, x), cast(exl_kernels.Linear, w), residual)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = torch.empty(x.shape[0], w.out_features, dtype=torch.float32)
        self._ops.norm_linear(x, norm, eps, cast(exl_kernels.Linear, w), out)
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
        if out is None:
            out = torch.empty(x.shape[0], w.out_features // 2, dtype=torch.float32)
        out = cast(Tensor, out)
        self._ops.norm_gated_linear(x, norm, eps, cast(exl_kernels.Linear, w), kind, out)
        return out

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        out = torch.empty(token_ids.shape[0], w.in_features, dtype=torch.float32)
        self._ops.embedding(token_ids, cast(exl_kernels.Linear, w), out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # empty_like takes a third of the time of empty(x.shape). The kernel checks x for float32.
        out = torch.empty_like(x)
        self._ops.rms_norm(x, weight, eps, out)
        return out

    def rms_norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        self._ops.rms_norm_heads_(x, weight, eps)

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._ops.rope_(x, cos, sin)

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        rows, columns = gate_up.shape
        out = torch.empty(rows, columns // 2, dtype=torch.float32)
        self._ops.gated_activation(gate_up, kind, out)
        return out

    def log_sum_exp(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], dtype=torch.float32)
        self._ops.log_sum_exp(x, out)
        return out

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> None:
        self._ops.write_kv(key, value, key_cache, value_cache, slots)

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
        out = torch.empty(rows, heads * head_dim, dtype=torch.float32)
        self._ops.paged_attention(
            q,
            key_cache,
            value_cache,
            page_table,
            row_starts,
            past_lens,
            scale,
            window,
            softcap,
            out,
        )
        return out

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
        return exl_kernels.Table.AttentionBatch(
            page_table, row_starts, past_lens, slots, cos, sin, num_pages, page_size
        )

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
        bound = cast(exl_kernels.Table.AttentionBatch, batch)
        self._ops.attend_(
            qkv,
            bound,
            key_cache,
            value_cache,
            q_norm,
            k_norm,
            eps,
            scale,
            window,
            softcap,
            head_scale,
            head_shift,
        )

    def sample(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        ids: Tensor | None = None,
        values: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        uniform: float = 0.0,
        num_top: int = 0,
    ) -> Sampled:
        return Sampled._make(
            self._ops.sample(
                logits, mask, ids, values, temperature, top_k, top_p, min_p, uniform, num_top
            )
        )

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        drawn = [settings.draw(self.sample, logits[settings.row]) for settings in rows]
        if next_step is not None:
            next_step.launch_after(drawn)
        return drawn


if TYPE_CHECKING:

    def _is_an_op_table(table: NativeTable) -> OpTable:
        return table
