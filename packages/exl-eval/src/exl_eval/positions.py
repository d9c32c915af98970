"""Negative log-likelihood by position within the window, in buckets that double in size.

The position of a token is the number of tokens before it in its window, BOS included, which is the
context that the model predicts it from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_eval.estimates import mean_and_error
from exl_eval.result import PositionBucket


def nll_by_position(firsts: Sequence[int], windows: Sequence[Tensor]) -> tuple[PositionBucket, ...]:
    """Buckets 1, 2-3, 4-7, 8-15 ... of `windows`, float64 [scored tokens of each window].

    `firsts[i]` is the position of the first scored token of window i. Buckets without scored tokens
    are left out.
    """
    positions = torch.cat(
        [torch.arange(first, first + len(nll)) for first, nll in zip(firsts, windows, strict=True)]
    )
    values = torch.cat(list(windows))
    buckets = []
    first = 1
    while first <= int(positions.max()):
        inside = values[(positions >= first) & (positions < 2 * first)]
        if len(inside):
            mean, stderr = mean_and_error(inside)
            buckets.append(PositionBucket(first, 2 * first - 1, len(inside), mean, stderr))
        first *= 2
    return tuple(buckets)
