"""Recurrent ops of the autograd backend: whole sequences from zeros, in chunks."""

from __future__ import annotations

from torch import Tensor

from exl_core.ops.backends.recurrence import (
    conv,
    delta_chunks,
    delta_inputs,
    scan_chunks,
    scan_inputs,
)
from exl_core.ops.recurrent import Convolution, DeltaRule, StateRows, StateScan, Taps


class AutogradRecurrentOps:
    """RecurrentOps for states [R, T, width], R sequences of T tokens. `states` and `rows` are not
    used: there is no earlier state, and none is kept."""

    @staticmethod
    def causal_conv(
        x: Tensor,
        taps: Taps,
        states: Tensor,  # noqa: ARG004
        rows: StateRows,  # noqa: ARG004
    ) -> Tensor:
        wide = x.float()
        count, channels = taps.weight.shape
        return conv(wide, taps, wide.new_zeros(len(wide), count - 1, channels))[0]

    def fuses_conv(self, x: Tensor, taps: Taps, rows: StateRows) -> bool:  # noqa: ARG002
        return False

    def delta_rule(
        self,
        qkv: Tensor,
        ba: Tensor,
        rule: DeltaRule,
        states: Tensor,  # noqa: ARG002
        rows: StateRows,
        *,
        conv: Convolution | None = None,
    ) -> Tensor:
        if conv is not None:
            qkv = self.causal_conv(qkv, conv.taps, conv.states, rows)
        shape = len(qkv), rule.value_heads, rule.key_dim, rule.value_dim
        zeros = qkv.new_zeros(shape).float()
        return delta_chunks(delta_inputs(qkv.float(), ba.float(), rule), zeros)[0].flatten(-2)

    def state_scan(
        self,
        xbc: Tensor,
        dt: Tensor,
        scan: StateScan,
        states: Tensor,  # noqa: ARG002
        rows: StateRows,
        *,
        conv: Convolution | None = None,
    ) -> Tensor:
        if conv is not None:
            xbc = self.causal_conv(xbc, conv.taps, conv.states, rows)
        zeros = xbc.new_zeros(len(xbc), scan.heads, scan.head_dim, scan.state_size).float()
        inputs = scan_inputs(xbc.float(), dt.float(), scan)
        return scan_chunks(inputs, zeros, scan.skip)[0].flatten(-2)
