"""Recurrent ops of the reference table, in float64, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.backends.recurrence import (
    conv,
    delta_inputs,
    delta_steps,
    scan_inputs,
    scan_steps,
    spans,
    start_of,
)
from exl_core.ops.checks import F32, OpInputError, check, check_contiguous, check_range
from exl_core.ops.recurrent import Convolution, DeltaRule, StateRows, StateScan, Taps


class ReferenceRecurrentOps:
    """RecurrentOps in plain torch."""

    @staticmethod
    def causal_conv(x: Tensor, taps: Taps, states: Tensor, rows: StateRows) -> Tensor:
        count, channels = taps.weight.shape
        check_rows("causal_conv", rows, states, x.shape[0])
        check("causal_conv", "x", x, F32, None, channels)
        check_contiguous("causal_conv", "x", x, 1)
        check("causal_conv", "states", states, F32, None, count - 1, channels)
        out = torch.empty(x.shape)
        for span in spans(rows):
            before = start_of(states, span).double()
            y, after = conv(x[span.first : span.last].double(), taps, before)
            out[span.first : span.last], states[span.slot] = y, after
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
        heads, width = rule.value_heads, rule.value_heads * rule.value_dim
        check_rows("delta_rule", rows, states, qkv.shape[0])
        check("delta_rule", "qkv", qkv, F32, None, 2 * rule.key_heads * rule.key_dim + width)
        decays = rule.key_dim if rule.is_by_row else 1
        check("delta_rule", "ba", ba, F32, qkv.shape[0], (1 + decays) * heads)
        check("delta_rule", "states", states, F32, None, heads, rule.key_dim, rule.value_dim)
        out = torch.empty(qkv.shape[0], width)
        for span in spans(rows):
            part = slice(span.first, span.last)
            inputs = delta_inputs(qkv[part].double(), ba[part].double(), rule)
            y, after = delta_steps(inputs, start_of(states, span).double())
            out[part], states[span.slot] = y.flatten(1), after
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
        width = scan.heads * scan.head_dim
        check_rows("state_scan", rows, states, xbc.shape[0])
        check("state_scan", "xbc", xbc, F32, None, width + 2 * scan.groups * scan.state_size)
        check("state_scan", "dt", dt, F32, xbc.shape[0], scan.heads)
        check("state_scan", "states", states, F32, None, scan.heads, scan.head_dim, scan.state_size)
        out = torch.empty(xbc.shape[0], width)
        for span in spans(rows):
            part = slice(span.first, span.last)
            inputs = scan_inputs(xbc[part].double(), dt[part].double(), scan)
            before = start_of(states, span).double()
            y, after = scan_steps(inputs, before, scan.skip)
            out[part], states[span.slot] = y.flatten(1), after
        return out


def check_rows(op: str, rows: StateRows, states: Tensor, count: int) -> None:
    """Checks that the sequences cover `count` rows, in order, and have slots of their own."""
    seqs = len(rows.slots)
    check(op, "row_starts", rows.row_starts, (torch.int32,), seqs + 1)
    check(op, "past_lens", rows.past_lens, (torch.int32,), seqs)
    check(op, "slots", rows.slots, (torch.int64,), seqs)
    check_range(op, "slots", rows.slots, len(states))
    starts = rows.row_starts.tolist()
    if starts[0] != 0 or starts[-1] != count or starts != sorted(starts):
        raise OpInputError(f"{op}: row_starts (expected ascending from 0 to {count}, got {starts})")
    used = [span.slot for span in spans(rows)]
    if len(set(used)) < len(used):
        raise OpInputError(f"{op}: slots (expected one for each sequence, got {used})")
