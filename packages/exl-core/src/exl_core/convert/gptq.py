"""Codes of one matrix, so that its outputs change least on given inputs.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) in the order of the inputs' energy: rows are rounded
one after the other, and what a row gets wrong is made up for by the rows after it. With inputs'
second moments H and the error E of the weights the cost is tr(E' H E); H = R R' with R upper
triangular makes it a sum over rows of (error left in the row)^2 * R_ii^2. Matrices of the same
inputs, and candidates of one matrix, are columns side by side: nothing but H couples rows, and
nothing couples columns but the largest scale of a group.

K input features, N columns. All tensors are float32 on one device unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.convert.scales import group_scales, zero_point

ROW_STEP = 32
DAMPING = 0.01
DAMPING_STEPS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Factor(NamedTuple):
    """H + damping in the order of stored rows, taken apart.

    order      int64 [K]: the feature of each stored row
    feedback   [K, K] upper: row i tells how an error of stored row i is made up for by the others
    curvature  [K]: R_ii^2, the cost of a unit error that is left in a stored row
    damping    what was added to the diagonal, as a share of its mean
    """

    order: Tensor
    feedback: Tensor
    curvature: Tensor
    damping: float


def factorize(hessian: Tensor, damping: float = DAMPING) -> Factor | None:
    """None if no damping of `DAMPING_STEPS` makes it positive definite. `hessian` [K, K]."""
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    mean = float(diagonal.double().mean())
    if not mean > 0 or not torch.isfinite(hessian).all():
        return None
    # R R' = H, R upper triangular: Cholesky from the last row to the first.
    flipped = order.flip(0)
    base = hessian.double()[flipped][:, flipped]
    for step in DAMPING_STEPS:
        damped = base.clone()
        damped.diagonal().add_(mean * damping * step)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            upper = lower.flip(0, 1)  # [K, K], R
            size = upper.diagonal()
            eye = torch.eye(len(size), dtype=upper.dtype, device=upper.device)
            inverse = torch.linalg.solve_triangular(upper, eye, upper=True)  # R^-1
            feedback = (inverse * size[:, None]).float()
            return Factor(order, feedback, size.square().float(), damping * step)
    return None


def plain_factor(features: int, device: torch.device) -> Factor:
    """Of inputs that nothing is known of: rounding to nearest, in the features' own order."""
    eye = torch.eye(features, device=device)
    return Factor(torch.arange(features, device=device), eye, eye.diagonal(), 0.0)


class Rounded(NamedTuple):
    """Codes uint8 [K, N] and scale codes uint8 [G, N] of stored rows, largest scales float16 [G],
    weights as read back float32 [K, N], and the cost of each column [N]."""

    codes: Tensor
    scale_codes: Tensor
    scale_max: Tensor
    weight: Tensor
    cost: Tensor


def quantize_columns(
    weight: Tensor, factor: Factor, groups: Sequence[tuple[int, int]], trials: int
) -> Rounded:
    """`weight` [K, N] in the order of stored rows; `groups` are pairs (bits, rows)."""
    rest = weight.clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    rounded = torch.empty_like(weight)
    cost = torch.zeros(weight.shape[1], device=weight.device)
    scale_codes, scale_max = [], []
    row = 0
    for bits, rows in groups:
        span = slice(row, row + rows)
        found = group_scales(rest[span], factor.curvature[span], bits, trials)
        scale_codes.append(found.codes)
        scale_max.append(found.largest)
        for first in range(row, row + rows, ROW_STEP):
            block = slice(first, min(first + ROW_STEP, row + rows))
            work = _Block(rest[block], codes[block], rounded[block], factor.feedback[block, block])
            errors = _round_block(work, found.scales, bits)
            cost += (errors.square() * factor.curvature[block, None]).sum(0)
            if block.stop < len(rest):
                after = factor.feedback[block, block.stop :]
                rest[block.stop :].addmm_(after.T, errors, alpha=-1)
        row += rows
    return Rounded(codes, torch.stack(scale_codes), torch.stack(scale_max), rounded, cost)


class _Block(NamedTuple):
    """Rows that are rounded in turn: their weights, room for codes and what they are read back as,
    and their feedback on each other."""

    weight: Tensor
    codes: Tensor
    rounded: Tensor
    feedback: Tensor


def _round_block(block: _Block, scales: Tensor, bits: int) -> Tensor:
    """The errors that are left in the rows [rows, N]."""
    zero = zero_point(bits)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    weight, feedback = block.weight, block.feedback
    errors, steps = torch.empty_like(weight), torch.empty_like(weight)
    for i in range(len(weight)):
        step = torch.mul(weight[i], inverse, out=steps[i]).round_().clamp_(-zero, zero - 1)
        error = torch.addcmul(weight[i], step, scales, value=-1, out=errors[i])
        if i + 1 < len(weight):
            weight[i + 1 :].addr_(feedback[i, i + 1 :], error, alpha=-1)
    torch.mul(steps, scales, out=block.rounded)
    block.codes.copy_(steps.add_(zero))
    return errors
