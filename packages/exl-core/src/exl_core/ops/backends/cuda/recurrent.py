"""Recurrent ops of one GPU, in torch.

A pass in which every sequence has one row, as in decode, is computed for all sequences at once and
without synchronization: captured graphs may contain it. Other passes compute one sequence after the
other, in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.backends.recurrence import (
    DeltaInputs,
    ScanInputs,
    conv,
    delta_chunks,
    delta_inputs,
    delta_step,
    scan_chunks,
    scan_inputs,
    scan_step,
    spans,
    start_of,
)
from exl_core.ops.recurrent import DeltaRule, StateRows, StateScan, Taps


class CudaRecurrentOps:
    """RecurrentOps of one GPU."""

    @staticmethod
    def causal_conv(x: Tensor, taps: Taps, states: Tensor, rows: StateRows) -> Tensor:
        wide = x.float()
        if is_decoding(rows, x):
            before = held_states(states, rows)  # [seqs, T - 1, C]
            y, after = conv(wide[:, None], taps, before)
            keep_states(states, rows, after)
            return y[:, 0]
        out = torch.empty(x.shape, device=x.device)
        for span in spans(rows):
            part = slice(span.first, span.last)
            y, after = conv(wide[part], taps, start_of(states, span))
            out[part], states[span.slot] = y, after
        return out

    @staticmethod
    def delta_rule(
        qkv: Tensor, ba: Tensor, rule: DeltaRule, states: Tensor, rows: StateRows
    ) -> Tensor:
        inputs = delta_inputs(qkv.float(), ba.float(), rule)
        if is_decoding(rows, qkv):
            y, after = delta_step(inputs, held_states(states, rows))
            keep_states(states, rows, after)
            return y.flatten(1)
        out = torch.empty(len(qkv), rule.value_heads * rule.value_dim, device=qkv.device)
        for span in spans(rows):
            part = slice(span.first, span.last)
            before = start_of(states, span)
            y, after = delta_chunks(DeltaInputs(*(x[part] for x in inputs)), before)
            out[part], states[span.slot] = y.flatten(1), after
        return out

    @staticmethod
    def state_scan(
        xbc: Tensor, dt: Tensor, scan: StateScan, states: Tensor, rows: StateRows
    ) -> Tensor:
        inputs = scan_inputs(xbc.float(), dt.float(), scan)
        if is_decoding(rows, xbc):
            y, after = scan_step(inputs, held_states(states, rows), scan.skip)
            keep_states(states, rows, after)
            return y.flatten(1)
        out = torch.empty(len(xbc), scan.heads * scan.head_dim, device=xbc.device)
        for span in spans(rows):
            part = slice(span.first, span.last)
            before = start_of(states, span)
            y, after = scan_chunks(ScanInputs(*(x[part] for x in inputs)), before, scan.skip)
            out[part], states[span.slot] = y.flatten(1), after
        return out


def is_decoding(rows: StateRows, x: Tensor) -> bool:
    """Whether every sequence has one row. Operands on the device are not read."""
    if len(rows.slots) != len(x):
        return False
    return rows.row_starts.is_cuda or bool((rows.row_starts.diff() == 1).all())


def held_states(states: Tensor, rows: StateRows) -> Tensor:
    """States of the sequences, one after the other; zeros for sequences without cached tokens."""
    held = states.index_select(0, rows.slots.to(states.device))
    is_old = (rows.past_lens.to(states.device) > 0).view(-1, *[1] * (held.dim() - 1))
    return torch.where(is_old, held, 0.0)  # a slot may hold NaN from an earlier sequence


def keep_states(states: Tensor, rows: StateRows, after: Tensor) -> None:
    states.index_copy_(0, rows.slots.to(states.device), after)
