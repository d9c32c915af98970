"""Recurrent ops of the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.recurrent import Convolution, DeltaRule, StateRows, StateScan, Taps


class CpuRecurrentOps:
    """RecurrentOps of the CPU kernels."""

    _ops: exl_kernels.Table

    def causal_conv(self, x: Tensor, taps: Taps, states: Tensor, rows: StateRows) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.float32)
        of_rows = rows.row_starts, rows.past_lens, rows.slots
        self._ops.causal_conv(x, taps.weight, taps.bias, taps.has_silu, states, *of_rows, out)
        return out

    def fuses_conv(self, x: Tensor, taps: Taps, rows: StateRows) -> bool:  # noqa: ARG002
        return False

    def delta_rule(
        self,
        qkv: Tensor,
        ba: Tensor,
        rule: DeltaRule,
        states: Tensor,
        rows: StateRows,
        *,
        conv: Convolution | None = None,
    ) -> Tensor:
        if conv is not None:
            qkv = self.causal_conv(qkv, conv.taps, conv.states, rows)
        out = torch.empty(len(qkv), rule.value_heads * rule.value_dim, dtype=torch.float32)
        numbers = rule.key_heads, rule.is_tiled, rule.is_by_row, rule.decay, rule.dt_bias
        of_rows = rows.row_starts, rows.past_lens, rows.slots
        b, a = ba[:, : rule.value_heads], ba[:, rule.value_heads :]
        self._ops.delta_rule(qkv, b, a, *numbers, states, *of_rows, out)
        return out

    def state_scan(
        self,
        xbc: Tensor,
        dt: Tensor,
        scan: StateScan,
        states: Tensor,
        rows: StateRows,
        *,
        conv: Convolution | None = None,
    ) -> Tensor:
        if conv is not None:
            xbc = self.causal_conv(xbc, conv.taps, conv.states, rows)
        out = torch.empty(len(xbc), scan.heads * scan.head_dim, dtype=torch.float32)
        numbers = scan.groups, scan.decay, scan.dt_bias, scan.skip, *scan.steps
        of_rows = rows.row_starts, rows.past_lens, rows.slots
        self._ops.state_scan(xbc, dt, *numbers, states, *of_rows, out)
        return out
