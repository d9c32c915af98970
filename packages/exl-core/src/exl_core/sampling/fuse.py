"""The chain top-k, top-p, min-p in one go, without sorting the vocabulary.

The steps of `steps.py` say what is kept; this finds the same tokens faster, and the tests hold it
to them. A selection of the k largest costs a fraction of a sort. Without top-k, the nucleus of
top-p is looked for among the likeliest few hundred tokens, and only if they do not cover it in a
histogram of all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exl_core.sampling.steps import descending, weights

_NUCLEUS_WIDTH = 256
"""Tokens among which a nucleus is looked for first: most replies of a model are that sure."""

_BUCKETS_PER_UNIT = 64
_BUCKETS = 2048
"""Of a wide nucleus: equal steps of logit, 32 units down, which is a factor of 1e-14."""


def shortlist(
    logits: Tensor, largest: Tensor, *, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor | None, Tensor]:
    """Ids of the tokens that are kept, ascending, and their weights. No ids: all tokens, in order.

    `largest` is the largest logit. Weights are probabilities but for a common factor.
    """
    floor = largest + math.log(min_p) if min_p > 0.0 else None
    if 0 < top_k < len(logits):
        ids = _likeliest(logits, top_k)
        if top_p < 1.0:
            weight = weights(logits[ids], largest).double()
            ids = _nucleus(ids, weight, top_p * float(weight.sum()))
        return _chosen(logits, largest, ids, floor)
    weight = weights(logits, largest)
    if top_p < 1.0:
        wanted = top_p * float(weight.sum(dtype=torch.float64))
        if len(logits) > _NUCLEUS_WIDTH:
            ids = _likeliest(logits, _NUCLEUS_WIDTH)
            likeliest = weight[ids].double()
            if float(likeliest.sum()) >= wanted:
                return _chosen(logits, largest, _nucleus(ids, likeliest, wanted), floor)
        weight = _wide_nucleus(logits, largest, weight, wanted)
    if floor is not None:
        weight.masked_fill_(logits < floor, 0.0)
    return None, weight


def _chosen(
    logits: Tensor, largest: Tensor, ids: Tensor, floor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The last step on a short list: min-p, and the order of ids, in which all draws are made."""
    ids = ids.sort().values
    values = logits[ids]
    if floor is not None:
        is_kept = values >= floor
        ids, values = ids[is_kept], values[is_kept]
    return ids, weights(values, largest)


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits, largest first, equals by id."""
    values, ids = torch.topk(logits, k + 1)
    if values[k - 1] == values[k]:
        # Which of the equals at the border `topk` returns is not specified: take the lowest ids.
        ids = (logits >= values[k]).nonzero().squeeze(1)
    else:
        ids = ids[:k].sort().values
    return ids[descending(logits[ids])][:k]


def _nucleus(ids: Tensor, weight: Tensor, wanted: float) -> Tensor:
    """The beginning of a descending list that weighs `wanted`, with the token that reaches it."""
    return ids[weight.cumsum(0) - weight < wanted]


def _wide_nucleus(logits: Tensor, largest: Tensor, weight: Tensor, wanted: float) -> Tensor:
    """The weights, 0 outside the nucleus.

    Buckets of similar logits are weighed: whole buckets are in or out, and only the one in which
    the nucleus ends is sorted.
    """
    bucket = ((largest - logits) * _BUCKETS_PER_UNIT).clamp_(max=_BUCKETS - 1).int()
    sums = torch.bincount(bucket, weights=weight.double(), minlength=_BUCKETS)
    running = sums.cumsum(0)
    border = min(int(torch.searchsorted(running, wanted)), _BUCKETS - 1)
    before = float(running[border] - sums[border])
    inside = (bucket == border).nonzero().squeeze(1)
    inside = inside[descending(logits[inside])]
    inside = _nucleus(inside, weight[inside].double(), wanted - before)
    kept = weight * (bucket < border)
    kept[inside] = weight[inside]
    return kept
