"""Scales of a group of stored rows: what 4 bits a column and one number for all columns allow.

The scale of code c is fp16(fp16(largest / 256) * (c + 1)^2), rounded as readers round it. Errors of
rows count by their curvature (`gptq.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = {2: 0.3, 3: 0.45, 4: 0.6, 5: 0.7, 6: 0.75, 8: 0.85}
"""By width: the smallest scale that may be best, as a share of one that cuts no value off."""
LARGEST_TRIED = (1.0, 0.94)  # of the best scale of all columns: the codes' grid moves with it


class GroupScales(NamedTuple):
    """Codes uint8 [N], exact scales float32 [N], and the largest one, a float16 scalar."""

    codes: Tensor
    scales: Tensor
    largest: Tensor


def zero_point(bits: int) -> int:
    """The code of 0; codes less this are -zero .. zero - 1."""
    return int(2 ** (bits - 1))


def exact_scales(largest: Tensor, codes: Tensor) -> Tensor:
    """As readers compute them, float32; `largest` float16 and `codes` 0 .. 15 broadcast."""
    step = (largest.float() / 256).half().float()
    return ((codes.float() + 1).square() * step).half().float()


def group_scales(values: Tensor, curvature: Tensor, bits: int, trials: int) -> GroupScales:
    """The best of `trials` scales for each column of values [rows, N], rows weighted by
    curvature [rows], brought to codes that all columns share."""
    zero = zero_point(bits)
    whole = torch.maximum(values.amax(0) / (zero - 1), -values.amin(0) / zero)  # [N]
    weights = curvature / curvature.sum().clamp(min=torch.finfo(torch.float32).tiny)
    best, chosen = torch.full_like(whole, torch.inf), whole.clone()
    for share in torch.linspace(1.0, SMALLEST[bits], trials).tolist():
        scale = whole * share
        error = _error(values, weights, scale, zero)
        is_better = error < best
        best = torch.where(is_better, error, best)
        chosen = torch.where(is_better, scale, chosen)
    return _coded(values, weights, chosen, zero)


def _coded(values: Tensor, weights: Tensor, wanted: Tensor, zero: int) -> GroupScales:
    """The codes next to the wanted scales [N] that err least."""
    least: Tensor | None = None
    for share in LARGEST_TRIED:
        largest = (wanted.max() * share).clamp(max=65504.0).half()
        step = (largest.float() / 256).half().float()
        root = (wanted / (256 * step)).nan_to_num(0.0, 1.0, 0.0).sqrt() * 16 - 1  # [N]
        low = root.floor().clamp(0, 15)
        high = (low + 1).clamp(max=15)
        errors = [_error(values, weights, exact_scales(largest, c), zero) for c in (low, high)]
        codes = torch.where(errors[1] < errors[0], high, low)
        total = torch.minimum(*errors).sum()
        if least is None or bool(total < least):
            least, found = total, (codes, largest)
    codes, largest = found
    return GroupScales(codes.to(torch.uint8), exact_scales(largest, codes), largest)


def _error(values: Tensor, weights: Tensor, scale: Tensor, zero: int) -> Tensor:
    """Weighted squared error of rounding at a scale [N]: [N]."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    step = (values * inverse).round_().clamp_(-zero, zero - 1)
    error = step.mul_(scale).sub_(values).square_()
    return weights @ error
