"""Divergence of two distributions of the next token, per position.

P is the reference, Q the candidate. The formulas are computed on logits, in blocks of rows that
fit into a CPU's cache: exponentials and differences in float32, their sums in float64. Both are
distributions over the first `vocab_size` tokens, which both models have; columns of padding are
excluded. Knows neither models nor texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from exl_core.engine.score import blocks_of_rows

_LEAST = 1e-30
"""Lower bound on the probability of a tail, so that its logarithm is finite."""


class Positions(NamedTuple):
    """One value per scored position: float64 [n] each, on the CPU.

    kld            sum over v of P(v) (log P(v) - log Q(v)), in nats
    reference_nll  -log P(x) of the true token x
    nll            -log Q(x)
    same_top       1 if P and Q have the same likeliest token, else 0
    confidence     the largest P(v)
    kld_variance   squared standard error of `kld` if P is a `CompactRows`, else 0
    """

    kld: Tensor
    reference_nll: Tensor
    nll: Tensor
    same_top: Tensor
    confidence: Tensor
    kld_variance: Tensor

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))


class CompactRows(NamedTuple):
    """Distributions in a form small enough for a file: per row, the likeliest tokens, and a sample
    of the others (the tail), drawn in proportion to their probabilities.

    top_ids         int32 [n, top], likeliest first
    top_log_probs   float32 [n, top]
    tail            float64 [n], total probability of all other tokens
    tail_ids        int32 [n, samples]
    tail_log_probs  float32 [n, samples]
    true_log_probs  float64 [n], of the true tokens
    """

    top_ids: Tensor
    top_log_probs: Tensor
    tail: Tensor
    tail_ids: Tensor
    tail_log_probs: Tensor
    true_log_probs: Tensor

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def rows(self, start: int, end: int) -> CompactRows:
        return CompactRows(*(column[start:end] for column in self))


def compare_logits(
    reference: Tensor, candidate: Tensor, targets: Tensor, vocab_size: int
) -> Positions:
    """Compares the logits of two models: float32 [n, at least vocab_size] each, with the true
    tokens `targets` int64 [n]. Computes on the candidate's device."""
    parts = []
    for block in blocks_of_rows(candidate):
        p = reference[block, :vocab_size].to(candidate.device)
        parts.append(_compare_block(p, candidate[block, :vocab_size], targets[block]))
    return Positions.join(parts)


def compare_compact(
    reference: CompactRows, candidate: Tensor, targets: Tensor, vocab_size: int
) -> Positions:
    """As `compare_logits`, with a reference in compact form. Exact except for the divergence within
    the tail, which is estimated from the sample. The estimate is unbiased and never below 0."""
    parts = []
    for block in blocks_of_rows(candidate):
        rows = reference.rows(block.start, block.stop)
        parts.append(_compare_compact_block(rows, candidate[block, :vocab_size], targets[block]))
    return Positions.join(parts)


def compact_rows(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    generator: torch.Generator,
    *,
    top: int,
    samples: int,
) -> CompactRows:
    """Compact form of logits float32 [n, at least vocab_size]; `generator` is one of the CPU."""
    parts = []
    for block in blocks_of_rows(logits):
        rows = logits[block, :vocab_size].cpu()
        parts.append(_compact_block(rows, targets[block], generator, min(top, vocab_size), samples))
    return CompactRows.join(parts)


def _compare_block(p: Tensor, q: Tensor, targets: Tensor) -> Positions:
    """Compares one block: logits [rows, vocab] and targets [rows]."""
    ids = targets.to(q.device)[:, None]
    top_p, likeliest_p = p.max(1, keepdim=True)
    top_q, likeliest_q = q.max(1, keepdim=True)
    p, q = p - top_p, q - top_q
    weights = p.exp()
    sum_p = weights.sum(1, dtype=torch.float64)
    log_p, log_q = sum_p.log(), q.exp().sum(1, dtype=torch.float64).log()
    # The true divergence is at least 0. Rounding can make the computed one slightly negative.
    kld = ((weights * (p - q)).sum(1, dtype=torch.float64) / sum_p - log_p + log_q).clamp_(min=0)
    return Positions(
        kld=kld.cpu(),
        reference_nll=(log_p - p.gather(1, ids).squeeze(1)).cpu(),
        nll=(log_q - q.gather(1, ids).squeeze(1)).cpu(),
        same_top=(likeliest_p == likeliest_q).squeeze(1).double().cpu(),
        confidence=(1.0 / sum_p).cpu(),
        kld_variance=torch.zeros(len(p), dtype=torch.float64),
    )


def _compact_block(
    logits: Tensor, targets: Tensor, generator: torch.Generator, top: int, samples: int
) -> CompactRows:
    """Compact form of one block of logits [rows, vocab]."""
    shifted = logits - logits.amax(1, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(1, dtype=torch.float64)  # [rows]
    log_total = total.log().float()[:, None]
    top_logits, top_ids = shifted.topk(top, 1)  # [rows, top]
    rest = weights.scatter(1, top_ids, 0.0)  # [rows, vocab]
    tail = rest.sum(1, dtype=torch.float64) / total
    rest[tail <= _LEAST] = 1.0  # an empty tail: the sample is drawn but has weight 0
    tail_ids = torch.multinomial(rest, samples, replacement=True, generator=generator)
    return CompactRows(
        top_ids=top_ids.int(),
        top_log_probs=top_logits - log_total,
        tail=tail,
        tail_ids=tail_ids.int(),
        tail_log_probs=shifted.gather(1, tail_ids) - log_total,
        true_log_probs=shifted.gather(1, targets[:, None]).squeeze(1).double() - total.log(),
    )


def _compare_compact_block(p: CompactRows, logits: Tensor, targets: Tensor) -> Positions:
    """Compares one block with its compact reference. With t and u, the tail probabilities of P, Q:

        KL = sum over the top of P log(P / Q) + t log(t / u) + t KL(tail of P || tail of Q)

    With r = (Q(x) / u) / (P(x) / t) for x drawn from P's tail, the last divergence is the mean of
    r - 1 - log r, because the mean of r is 1."""
    device = logits.device
    top_ids, tail_ids = p.top_ids.long().to(device), p.tail_ids.long().to(device)
    top_q, likeliest_q = logits.max(1, keepdim=True)
    q = logits - top_q
    weights = q.exp()
    total = weights.sum(1, dtype=torch.float64)  # [rows]
    log_total = total.log()
    rest = weights.scatter(1, top_ids, 0.0).sum(1, dtype=torch.float64)
    log_u = (rest / total).clamp(min=_LEAST).log()
    tail = p.tail.to(device)
    log_t = tail.clamp(min=_LEAST).log()

    top_p = p.top_log_probs.double().to(device)  # [rows, top]
    log_ratio = top_p - (q.gather(1, top_ids).double() - log_total[:, None])
    kld = (top_p.exp() * log_ratio).sum(1) + tail * (log_t - log_u)
    tail_q = q.gather(1, tail_ids).double() - log_total[:, None]  # [rows, samples]
    log_r = (tail_q - log_u[:, None]) - (p.tail_log_probs.double().to(device) - log_t[:, None])
    estimates = log_r.exp() - 1 - log_r
    kld = kld.clamp(min=0) + tail * estimates.mean(1)
    nll = log_total - q.gather(1, targets.to(device)[:, None]).squeeze(1)
    return Positions(
        kld=kld.cpu(),
        reference_nll=-p.true_log_probs,
        nll=nll.cpu(),
        same_top=(top_ids[:, :1] == likeliest_q).squeeze(1).double().cpu(),
        confidence=top_p[:, 0].exp().cpu(),
        kld_variance=(tail.square() * estimates.var(1) / estimates.shape[1]).cpu(),
    )
