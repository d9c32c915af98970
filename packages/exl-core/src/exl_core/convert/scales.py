"""Scales of a group of stored rows: one 4-bit scale code per column, one largest scale per group.

The scale of code c is fp16(fp16(largest / 256) * (c + 1)^2), rounded as readers round it. Errors of
rows are weighted by curvature (`gptq.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exl_core.convert.replay import Replay

SMALLEST_SHARE = {2: 0.3, 3: 0.45, 4: 0.6, 5: 0.7, 6: 0.75, 8: 0.85}
"""Smallest scale that is tried, by width, as a share of the smallest scale that clips no value."""

Zero = Any
"""An int, or an int-valued tensor [V, 1] if the variants' widths differ. Clamping to an int is
faster on a CPU."""

LARGEST_SHARES = (1.0, 0.94)
"""Largest scales that are tried, as shares of the largest column scale. The scales of all codes
change with it."""


class GroupScales(NamedTuple):
    """Scales of V variants: codes uint8 [V, N], exact scales float32 [V, N], and the largest scale
    of each variant, float16 [V]."""

    codes: Tensor
    scales: Tensor
    largest: Tensor


def zero_point(bits: int) -> int:
    """Code of 0. Codes minus this number are -zero .. zero - 1."""
    return int(2 ** (bits - 1))


def exact_scales(largest: Tensor, codes: Tensor) -> Tensor:
    """Scales in float32 as readers compute them; broadcasts `largest` float16, `codes` 0 .. 15."""
    step = (largest.float() / 256).half().float()
    return ((codes.float() + 1).square() * step).half().float()


def group_scales(
    values: Tensor, curvature: Tensor, bits: Sequence[int], trials: int
) -> GroupScales:
    """Best of `trials` scales for each column of values [rows, V, N], rounded to scale codes.

    Errors of the rows are weighted by curvature [rows]. The N columns of a variant share one
    largest scale. `bits` are the widths of the V variants.
    """
    scales = _group_scales(values, curvature, choices=(tuple(bits), trials))
    return GroupScales(*(part.clone() if values.is_cuda else part for part in scales))


@cache  # without a limit: a graph capture cannot copy these tensors to the GPU, it must find them
def _trial_shares(bits: tuple[int, ...], trials: int, device: torch.device) -> tuple[Zero, Tensor]:
    """Code of 0, and the shares of the unclipped scale to try, [trials, V, 1]."""
    zero: Zero = zero_point(bits[0])
    if len(set(bits)) > 1:
        points = [[zero_point(width)] for width in bits]
        zero = torch.tensor(points, dtype=torch.float32, device=device)  # [V, 1]
    shares = [torch.linspace(1.0, SMALLEST_SHARE[width], trials) for width in bits]
    return zero, torch.stack(shares, 1)[:, :, None].to(device)


@Replay
def _group_scales(
    values: Tensor, curvature: Tensor, bits: tuple[int, ...], trials: int
) -> tuple[Tensor, ...]:
    zero, shares = _trial_shares(bits, trials, values.device)
    unclipped = torch.maximum(values.amax(0) / (zero - 1), -values.amin(0) / zero)  # [V, N]
    weights = curvature / curvature.sum().clamp(min=torch.finfo(torch.float32).tiny)
    best, chosen = torch.full_like(unclipped, torch.inf), unclipped
    chunk_size = trials if values.is_cuda else 1  # launches limit a GPU, so it tries all at once
    for chunk in torch.split(shares, chunk_size):
        scales = unclipped * chunk
        errors, best_trials = _errors(values, weights, scales, zero).min(0)
        chosen = torch.where(errors < best, scales.gather(0, best_trials[None])[0], chosen)
        best = torch.minimum(errors, best)
    return _round_scales(values, weights, chosen, zero)


def _round_scales(values: Tensor, weights: Tensor, targets: Tensor, zero: Zero) -> GroupScales:
    """Scale codes with the least error among the neighbors of the target scales [V, N]."""
    candidates = [(targets.amax(1) * share).clamp(max=65504.0).half() for share in LARGEST_SHARES]
    largest = torch.stack(candidates)[:, :, None]  # [L, V, 1]
    step = (largest.float() / 256).half().float()
    root = (targets / (256 * step)).nan_to_num(0.0, 1.0, 0.0).sqrt() * 16 - 1
    low = root.floor().clamp(0, 15)  # [L, V, N]
    codes = torch.stack((low, (low + 1).clamp(max=15)))  # [2, L, V, N]
    scales = exact_scales(largest, codes)
    errors = _errors(values, weights, scales.flatten(0, 1), zero).view_as(codes)
    is_higher = errors[1] < errors[0]
    totals = torch.where(is_higher, errors[1], errors[0]).sum(2)  # [L, V]
    best = totals.argmin(0)  # [V]
    variants = torch.arange(len(best), device=best.device)
    chosen = torch.where(is_higher, codes[1], codes[0])[best, variants]  # [V, N]
    largest = largest[best, variants]  # [V, 1]
    return GroupScales(chosen.to(torch.uint8), exact_scales(largest, chosen), largest[:, 0])


def _errors(values: Tensor, weights: Tensor, scales: Tensor, zero: Zero) -> Tensor:
    """Weighted squared error of rounding values [rows, V, N] at scales [C, V, N]: [C, V, N]."""
    values = values[:, None]
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    step = (values * inverse).round_().clamp_(-zero, zero - 1)  # [rows, C, V, N]
    error = step.mul_(scales).sub_(values).square_()
    return (weights @ error.flatten(1)).view_as(scales)
