"""Recurrent ops in torch, in the type of the operands: token by token, and in chunks.

Both forms compute the same functions (`ops/recurrent.py`). The chunked one replaces the loop over
tokens by a few matrix products per chunk. Dimensions: n tokens, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from exl_core.ops.recurrent import L2_EPS, DeltaRule, StateRows, StateScan, Taps

CHUNK = 64
"""Tokens of a chunk: products within a chunk grow with its square, those between chunks shrink."""

BLOCK = 16
"""Tokens of a block, whose pairs have decays by row computed one by one."""


class Span(NamedTuple):
    """Rows first .. last - 1 belong to one sequence with this slot."""

    first: int
    last: int
    slot: int
    is_new: bool


def spans(rows: StateRows) -> Iterator[Span]:
    """Sequences with rows. Reads the operands on the host."""
    starts, past = rows.row_starts.tolist(), rows.past_lens.tolist()
    for seq, slot in enumerate(rows.slots.tolist()):
        if starts[seq] < starts[seq + 1]:
            yield Span(starts[seq], starts[seq + 1], slot, past[seq] == 0)


def start_of(states: Tensor, span: Span) -> Tensor:
    """State of a sequence before its rows. A slot may hold anything of an earlier sequence."""
    return torch.zeros_like(states[span.slot]) if span.is_new else states[span.slot]


def conv(x: Tensor, taps: Taps, state: Tensor) -> tuple[Tensor, Tensor]:
    """y [..., n, C] of x [..., n, C] after the inputs `state` [..., T - 1, C], and the new one."""
    weight = taps.weight.to(x.dtype)
    count, n = len(weight), x.shape[-2]
    inputs = torch.cat([state.to(x.dtype), x], -2)  # [..., T - 1 + n, C]
    y = weight[0] * inputs[..., :n, :]
    for tap in range(1, count):
        y = y + weight[tap] * inputs[..., tap : tap + n, :]
    if taps.bias is not None:
        y = y + taps.bias.to(x.dtype)
    return functional.silu(y) if taps.has_silu else y, inputs[..., n:, :]


class DeltaInputs(NamedTuple):
    """Operands of the delta rule by value head: q, k [n, H, K], v [n, H, V], and the logarithm of
    the decay g [n, H], or [n, H, K] by row, and the factor beta [n, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def delta_inputs(qkv: Tensor, ba: Tensor, rule: DeltaRule) -> DeltaInputs:
    """Splits and normalizes the operands, [..., n, width] each."""
    size = rule.key_heads * rule.key_dim
    b, a = ba.tensor_split([rule.value_heads], -1)
    q, k, v = qkv.split_with_sizes([size, size, rule.value_heads * rule.value_dim], -1)
    q, k = (_normalized(_heads(x, rule.key_heads)) for x in (q, k))
    repeats = rule.value_heads // rule.key_heads
    if rule.is_tiled:
        q, k = (x.repeat(*[1] * (x.dim() - 2), repeats, 1) for x in (q, k))
    else:
        q, k = (x.repeat_interleave(repeats, -2) for x in (q, k))
    steps, decay = functional.softplus(a + rule.dt_bias.to(a.dtype)), rule.decay.to(a.dtype)
    if rule.is_by_row:
        steps, decay = _heads(steps, rule.value_heads), decay[:, None]
    g = -decay * steps
    v = _heads(v, rule.value_heads)
    return DeltaInputs(q * rule.key_dim**-0.5, k, v, g, torch.sigmoid(b))


def _heads(x: Tensor, count: int) -> Tensor:
    """x [..., count * d] -> [..., count, d]."""
    return x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


def _normalized(x: Tensor) -> Tensor:
    """x [..., d] divided by the root of its sum of squares."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def delta_step(one: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output [..., H, V] of one token and the new state [..., H, K, V]. The operands have no
    dimension n."""
    decay = one.g.exp()[..., None]
    state = state * (decay if one.g.dim() == one.k.dim() else decay[..., None])
    delta = one.v - (state * one.k[..., None]).sum(-2)
    state = state + one.k[..., None] * (one.beta[..., None] * delta)[..., None, :]
    return (state * one.q[..., None]).sum(-2), state


def delta_steps(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, V] and the new state [H, K, V], token by token."""
    outputs = []
    for token in range(len(inputs.q)):
        y, state = delta_step(DeltaInputs(*(x[token] for x in inputs)), state)
        outputs.append(y)
    return torch.stack(outputs), state


def delta_chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks. Leading dimensions before n are allowed: [..., n, H, V]."""
    is_by_row = inputs.g.dim() == inputs.k.dim()
    outputs = []
    for first in range(0, inputs.q.shape[-3], CHUNK):
        part = slice(first, first + CHUNK)
        q, k, v = (x[..., part, :, :].transpose(-3, -2) for x in inputs[:3])  # [..., H, n, K or V]
        beta = inputs.beta[..., part, :].transpose(-2, -1)[..., None]  # [..., H, n, 1]
        if is_by_row:
            total = inputs.g[..., part, :, :].transpose(-3, -2).cumsum(-2)  # [..., H, n, K]
            products = _products_by_row(torch.stack([k, q]), k, total)
        else:
            total, decays = _decays(inputs.g[..., part, :].transpose(-2, -1))
            products = torch.stack([k, q]) @ k.transpose(-2, -1) * decays
            total = total[..., None]  # [..., H, n, 1]
        y, state = _delta_chunk(DeltaInputs(q, k, v, total, beta), products, state)
        outputs.append(y.transpose(-3, -2))
    return torch.cat(outputs, -3), state


def _delta_chunk(of: DeltaInputs, products: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk, by head. `g` is its running sum. products [2, ..., H, i, j]: key i and query i
    times key j, with the decay from token j to token i."""
    grown = of.g.exp()
    inner = (of.beta * products[0]).tril(-1)
    inner = inner + torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    wanted = of.beta * (of.v - (grown * of.k) @ state)
    delta = torch.linalg.solve_triangular(inner, wanted, upper=False, unitriangular=True)
    y = (grown * of.q) @ state + products[1] @ delta
    last = of.g[..., -1:, :]
    left = (last - of.g).exp() * of.k
    return y, last.exp().transpose(-2, -1) * state + left.transpose(-2, -1) @ delta


def _products_by_row(x: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Vectors x [..., n, K] times keys k [..., n, K], with the decay between the two in each row of
    the state: [..., n, n], 0 above the diagonal. `total` is the running sum of the decays' logs.

    exp(total[i] - total[j]) is at most 1, but neither of its factors is bounded. Tokens are divided
    into blocks. For keys of earlier blocks both factors are taken relative to the first token of
    block i. Neither exceeds 1, and where one of them becomes 0, the product is less than the
    smallest number. Within a block, differences are exact for each pair.
    """
    n, parts = k.shape[-2], []
    mask = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=k.device).tril()[..., None]
    for first in range(0, n, BLOCK):
        rows = slice(first, min(first + BLOCK, n))
        here, keys, count = total[..., rows, :], k[..., rows, :], rows.stop - first
        start = here[..., :1, :]
        left = x[..., rows, :] * (here - start).exp()
        right = k[..., :first, :] * (start - total[..., :first, :]).exp()
        between = here[..., :, None, :] - here[..., None, :, :]  # [..., i, j, K]
        decays = between.masked_fill(~mask[:count, :count], -torch.inf).exp()
        own = (x[..., rows, None, :] * (keys[..., None, :, :] * decays)).sum(-1)
        product = torch.cat([left @ right.transpose(-2, -1), own], -1)
        parts.append(functional.pad(product, (0, n - rows.stop)))
    return torch.cat(parts, -2)


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Running sum of g [..., H, n], and the decay from token j to token i [..., H, i, j]. It is 0
    where j follows i."""
    total = g.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    mask = torch.ones(between.shape[-2:], dtype=torch.bool, device=g.device).tril()
    return total, between.masked_fill(~mask, -torch.inf).exp()


class ScanInputs(NamedTuple):
    """Operands of the scan: x [n, H, P], B and C by head [n, H, N], the logarithm of the decay g
    and the step d [n, H]."""

    x: Tensor
    b: Tensor
    c: Tensor
    g: Tensor
    step: Tensor


def scan_inputs(xbc: Tensor, dt: Tensor, scan: StateScan) -> ScanInputs:
    """Splits the operands, [..., n, width] each."""
    size = scan.groups * scan.state_size
    x, b, c = xbc.split_with_sizes([scan.heads * scan.head_dim, size, size], -1)
    repeats = scan.heads // scan.groups
    b, c = (_heads(each, scan.groups).repeat_interleave(repeats, -2) for each in (b, c))
    step = functional.softplus(dt + scan.dt_bias.to(dt.dtype)).clamp(*scan.steps)
    g = -scan.decay.to(dt.dtype) * step
    return ScanInputs(_heads(x, scan.heads), b, c, g, step)


def scan_step(one: ScanInputs, state: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Output [..., H, P] of one token and the new state [..., H, P, N]. The operands have no
    dimension n."""
    added = (one.step[..., None] * one.x)[..., None] * one.b[..., None, :]
    state = state * one.g.exp()[..., None, None] + added
    return (state * one.c[..., None, :]).sum(-1) + skip.to(one.x.dtype)[:, None] * one.x, state


def scan_steps(inputs: ScanInputs, state: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, P] and the new state [H, P, N], token by token."""
    outputs = []
    for token in range(len(inputs.x)):
        y, state = scan_step(ScanInputs(*(x[token] for x in inputs)), state, skip)
        outputs.append(y)
    return torch.stack(outputs), state


def scan_chunks(inputs: ScanInputs, state: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks. Leading dimensions before n are allowed: [..., n, H, P]."""
    outputs = []
    for first in range(0, inputs.x.shape[-3], CHUNK):
        part = slice(first, first + CHUNK)
        by_token = (inputs.g[..., part, :], inputs.step[..., part, :])
        x, b, c = (each[..., part, :, :] for each in inputs[:3])
        y, state = _scan_chunk(ScanInputs(x, b, c, *by_token), state)
        outputs.append(y)
    return torch.cat(outputs, -3) + skip.to(inputs.x.dtype)[:, None] * inputs.x, state


def _scan_chunk(part: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    x, b, c = (each.transpose(-3, -2) for each in part[:3])  # [..., H, n, P or N]
    g, step = part.g.transpose(-2, -1), part.step.transpose(-2, -1)  # [..., H, n]
    total, decays = _decays(g)
    inputs = step[..., None] * x
    y = total.exp()[..., None] * (c @ state.transpose(-2, -1))
    y = y + ((c @ b.transpose(-2, -1)) * decays) @ inputs
    left = (total[..., -1:] - total).exp()[..., None]
    state = total[..., -1].exp()[..., None, None] * state + (left * inputs).transpose(-2, -1) @ b
    return y.transpose(-3, -2), state
