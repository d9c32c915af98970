"""Recurrent ops of one GPU.

The host reads no operand, so that captured graphs may contain passes of any kind. Where the rows of
a pass are on the CPU, each call copies them. `Stage.bind` therefore brings them once per pass.
"""

from __future__ import annotations

from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.upload import upload
from exl_core.ops.recurrent import DeltaRule, StateRows, StateScan, Taps
from exl_kernels import cuda_recurrent


class CudaRecurrentOps:
    """RecurrentOps of one GPU."""

    _gpu: Gpu

    def causal_conv(self, x: Tensor, taps: Taps, states: Tensor, rows: StateRows) -> Tensor:
        out = self._gpu.empty(*x.shape)
        bound = self._bound(rows)
        operands = cuda_recurrent.CausalConv(
            rows=_described(bound, len(x)),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=taps.weight.data_ptr(),
            bias=None if taps.bias is None else taps.bias.data_ptr(),
            states=states.data_ptr(),
            y=out.data_ptr(),
            x_dtype=TYPES[x.dtype],
            channels=x.shape[1],
            taps=len(taps.weight),
            has_silu=taps.has_silu,
        )
        self._gpu.call("causal_conv", operands)
        return out

    def delta_rule(
        self, qkv: Tensor, ba: Tensor, rule: DeltaRule, states: Tensor, rows: StateRows
    ) -> Tensor:
        out = self._gpu.empty(len(qkv), rule.value_heads * rule.value_dim)
        qkv, ba = qkv.float(), ba.float()
        bound = self._bound(rows)
        operands = cuda_recurrent.DeltaRule(
            rows=_described(bound, len(qkv)),
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            ba=ba.data_ptr(),
            ba_stride=ba.stride(0),
            decay=rule.decay.data_ptr(),
            dt_bias=rule.dt_bias.data_ptr(),
            states=states.data_ptr(),
            y=out.data_ptr(),
            key_heads=rule.key_heads,
            value_heads=rule.value_heads,
            key_dim=rule.key_dim,
            value_dim=rule.value_dim,
            is_tiled=rule.is_tiled,
            is_by_row=rule.is_by_row,
            is_invariant=self._gpu.is_invariant,
        )
        if not rule.is_by_row:
            self._set_workspace(operands, rule.value_heads, rule.key_heads, rule.key_dim)
        self._gpu.call("delta_rule", operands)
        return out

    def state_scan(
        self, xbc: Tensor, dt: Tensor, scan: StateScan, states: Tensor, rows: StateRows
    ) -> Tensor:
        out = self._gpu.empty(len(xbc), scan.heads * scan.head_dim)
        xbc, dt = xbc.float(), dt.float()
        bound = self._bound(rows)
        operands = cuda_recurrent.StateScan(
            rows=_described(bound, len(xbc)),
            xbc=xbc.data_ptr(),
            xbc_stride=xbc.stride(0),
            dt=dt.data_ptr(),
            dt_stride=dt.stride(0),
            decay=scan.decay.data_ptr(),
            dt_bias=scan.dt_bias.data_ptr(),
            skip=scan.skip.data_ptr(),
            states=states.data_ptr(),
            y=out.data_ptr(),
            heads=scan.heads,
            head_dim=scan.head_dim,
            state_size=scan.state_size,
            groups=scan.groups,
            least_step=scan.steps[0],
            largest_step=scan.steps[1],
            is_invariant=self._gpu.is_invariant,
        )
        self._set_workspace(operands, scan.heads, scan.groups, scan.state_size)
        self._gpu.call("state_scan", operands)
        return out

    def _set_workspace(
        self,
        operands: cuda_recurrent.DeltaRule | cuda_recurrent.StateScan,
        heads: int,
        key_heads: int,
        depth: int,
    ) -> None:
        """Memory for the chunked form, if some sequence of the pass may be long, and none in the
        batch-invariant mode, as chunks begin where the rows of a pass begin.

        Its size is a power of two, so that all smaller buffers, which are kept when a larger one
        replaces them, take less than the largest one.
        """
        if self._gpu.is_invariant:
            return
        rows, seqs = operands.rows.rows, operands.rows.seqs
        size = self._gpu.size("recurrence_workspace", rows, seqs, heads, key_heads, depth)
        if size:
            workspace = self._gpu.buffer("recurrence", 1 << (size - 1).bit_length())
            operands.workspace = workspace.data_ptr()
            operands.workspace_bytes = workspace.numel()

    def _bound(self, rows: StateRows) -> StateRows:
        """The rows on this device."""
        device = self._gpu.device
        operands = (rows.row_starts, rows.past_lens, rows.slots)
        return StateRows(*(upload(operand, device) for operand in operands))


def _described(rows: StateRows, count: int) -> cuda_recurrent.StateRows:
    """Rows on the device, for the library. The caller keeps them alive until its call."""
    return cuda_recurrent.StateRows(
        row_starts=rows.row_starts.data_ptr(),
        past_lens=rows.past_lens.data_ptr(),
        slots=rows.slots.data_ptr(),
        seqs=len(rows.slots),
        rows=count,
    )
