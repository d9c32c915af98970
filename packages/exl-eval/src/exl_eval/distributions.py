"""How far one distribution of the next token is from another, position by position.

P is the reference, Q the candidate; the formulas are computed on logits, in blocks that stay in a
CPU's cache: exponentials and differences in float32, their sums in float64. Knows neither models
nor texts.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from exl_core.engine.score import blocks_of_rows


class Positions(NamedTuple):
    """One value for each scored position, float64 [n] each, on the CPU.

    `kld`: sum over v of P(v) (log P(v) - log Q(v)), in nats, over the common vocabulary.
    `reference_nll`, `nll`: -log P(x) and -log Q(x) of the true token x. `same_top`: 1 where P and Q
    have the same likeliest token, else 0. `confidence`: the largest P(v)."""

    kld: Tensor
    reference_nll: Tensor
    nll: Tensor
    same_top: Tensor
    confidence: Tensor

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))


def compare_logits(reference: Tensor, candidate: Tensor, targets: Tensor) -> Positions:
    """Of logits float32 [n, vocab] of both models and the true tokens int64 [n].

    A vocabulary that is padded at its end is cut to the shorter one. The candidate's device
    computes.
    """
    common = min(reference.shape[1], candidate.shape[1])
    parts = []
    for block in blocks_of_rows(candidate):
        p = reference[block, :common].to(candidate.device)
        parts.append(_compare_block(p, candidate[block, :common], targets[block]))
    return Positions.join(parts)


def _compare_block(p: Tensor, q: Tensor, targets: Tensor) -> Positions:
    """Of logits [rows, common] and targets [rows]."""
    ids = targets.to(q.device)[:, None]
    top_p, likeliest_p = p.max(1, keepdim=True)
    top_q, likeliest_q = q.max(1, keepdim=True)
    p, q = p - top_p, q - top_q
    weights = p.exp()
    sum_p = weights.sum(1, dtype=torch.float64)
    sum_q = q.exp().sum(1, dtype=torch.float64)
    log_p, log_q = sum_p.log(), sum_q.log()
    # The true divergence is at least 0; what rounding leaves below is not.
    kld = ((weights * (p - q)).sum(1, dtype=torch.float64) / sum_p - log_p + log_q).clamp_(min=0)
    return Positions(
        kld=kld.cpu(),
        reference_nll=(log_p - p.gather(1, ids).squeeze(1)).cpu(),
        nll=(log_q - q.gather(1, ids).squeeze(1)).cpu(),
        same_top=(likeliest_p == likeliest_q).squeeze(1).double().cpu(),
        confidence=(1.0 / sum_p).cpu(),
    )
