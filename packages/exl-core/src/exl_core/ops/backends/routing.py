"""Choice of experts from the router's logits with torch, on any device, without synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import Routed, Routing


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """PackedExperts as a list of matrices of equal sizes."""

    experts: tuple[PackedLinear, ...]

    @classmethod
    def of(cls, experts: Sequence[PackedLinear]) -> StackedExperts:
        sizes = {(one.out_features, one.in_features) for one in experts}
        if len(sizes) != 1:
            raise ValueError(f"stack: experts (expected some of equal sizes, got {sorted(sizes)})")
        return cls(tuple(experts))

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    @property
    def out_features(self) -> int:
        return self.experts[0].out_features

    @property
    def in_features(self) -> int:
        return self.experts[0].in_features

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.experts)


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """Scores of the experts, from the router's logits, both float32 [m, E]."""
    return torch.softmax(logits, -1) if routing.scores == "softmax" else torch.sigmoid(logits)


def choose(logits: Tensor, routing: Routing, bias: Tensor | None) -> Routed:
    """The experts of each row of logits, float32 [m, E]."""
    scores = scores_of(logits, routing)
    ranked = scores if bias is None else scores + bias
    if routing.kept_groups < routing.groups:
        ranked = _in_best_groups(ranked, routing)
    # A stable sort, and not topk, puts the lower index of two equal scores first.
    ids = ranked.sort(stable=True, descending=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, ids)
    if routing.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    if routing.factor != 1.0:
        weights = weights * routing.factor
    return Routed(ids.to(torch.int32), weights)


def _in_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Scores [m, E] with minus infinity outside of the best groups."""
    grouped = ranked.view(len(ranked), routing.groups, -1)  # [m, groups, E / groups]
    best = grouped.topk(min(routing.group_scores, grouped.shape[-1]), -1).values.sum(-1)
    kept = best.sort(stable=True, descending=True).indices[:, : routing.kept_groups]
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, value=True)
    return grouped.masked_fill(~is_kept[..., None], -torch.inf).view(ranked.shape)
