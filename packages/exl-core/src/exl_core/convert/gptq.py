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

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.convert.replay import Replay
from exl_core.convert.scales import GroupScales, group_scales, zero_point

ROW_STEP = 32
DAMPING = 0.1  # of the mean diagonal; less does better on the calibration text and worse on others
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
        lower, info = torch.linalg.cholesky_ex(damped(base, damping * step))
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            upper = lower.flip(0, 1)  # [K, K], R
            size = upper.diagonal()
            eye = torch.eye(len(size), dtype=upper.dtype, device=upper.device)
            inverse = torch.linalg.solve_triangular(upper, eye, upper=True)  # R^-1
            feedback = (inverse * size[:, None]).float()
            return Factor(order, feedback, size.square().float(), damping * step)
    return None


def damped(hessian: Tensor, damping: float) -> Tensor:
    """Moments with that share of their mean diagonal on the diagonal."""
    return hessian + torch.eye(len(hessian)).to(hessian) * hessian.diagonal().mean() * damping


def identity_factor(features: int, device: torch.device) -> Factor:
    """Of inputs that nothing is known of: rounding to nearest, in the features' own order."""
    eye = torch.eye(features, device=device)
    return Factor(torch.arange(features, device=device), eye, eye.diagonal(), 0.0)


class Variant(NamedTuple):
    """Columns that share their groups, and the largest scale of each: one matrix in one layout.
    `groups` are pairs (bits, rows)."""

    columns: slice
    groups: Sequence[tuple[int, int]]


class Rounded(NamedTuple):
    """Codes uint8 [K, N] of stored rows; of each variant, scale codes uint8 [G, n] and largest
    scales float16 [G]; weights as they are read back, before their last rounding, float32 [K, N];
    and what the errors that are left cost, in every 32 rows, [K / 32, variants]."""

    codes: Tensor
    scales: list[tuple[Tensor, Tensor]]
    weight: Tensor
    cost: Tensor


def quantize_columns(
    weight: Tensor,
    factor: Factor,
    variants: Sequence[Variant],
    trials: int,
    column_weights: Tensor | None = None,
    *,
    check: Callable[[], None] | None = None,
) -> Rounded:
    """`weight` [K, N] in the order of stored rows; the variants' columns are all of them.

    `trials`: scales that are tried for each group and column. `column_weights` [N], how much the
    columns count, change `cost` and nothing else. `check` is called every 32 rows, and may raise.
    """
    adjusted = weight.clone()
    features, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    rounded = torch.empty_like(weight)
    grid = _Grid(*(weight.new_empty(columns) for _ in range(3)))
    starts = [_starts(variant.groups) for variant in variants]
    scales_by_variant: list[list[GroupScales]] = [[] for _ in variants]
    positions = torch.arange(columns, device=weight.device)
    costs = []
    for first in range(0, features, ROW_STEP):
        if check is not None:
            check()
        block = slice(first, min(first + ROW_STEP, features))
        for stop, indices in _groups_starting_at(variants, starts, first, weight):
            span = slice(first, stop)
            bits = [starts[index][first][0] for index in indices]
            values = torch.stack([adjusted[span, variants[index].columns] for index in indices], 1)
            scales = group_scales(values, factor.curvature[span], bits, trials)
            for i, index in enumerate(indices):
                scales_by_variant[index].append(GroupScales(*(part[i] for part in scales)))
            variant_columns = torch.cat([positions[variants[index].columns] for index in indices])
            grid.set(variant_columns, scales.scales, bits)
        errors, steps = _round_block(adjusted[block], factor.feedback[block, block], *grid)
        torch.mul(steps, grid.scale, out=rounded[block])
        codes[block].copy_(steps.add_(grid.zero))
        costs.append(factor.curvature[block] @ errors.square())  # [N]
        if block.stop < features:
            after = factor.feedback[block, block.stop :]
            adjusted[block.stop :].addmm_(after.T, errors, alpha=-1)
    stacked_scales = [
        (torch.stack([s.codes for s in scales]), torch.stack([s.largest for s in scales]))
        for scales in scales_by_variant
    ]
    row_costs = torch.stack(costs)  # [K / 32, N]
    if column_weights is not None:
        row_costs *= column_weights
    cost = torch.stack([row_costs[:, variant.columns].sum(1) for variant in variants], 1)
    return Rounded(codes, stacked_scales, rounded, cost)


def _groups_starting_at(
    variants: Sequence[Variant],
    starts: Sequence[Mapping[int, tuple[int, int]]],
    first: int,
    weight: Tensor,
) -> list[tuple[int, list[int]]]:
    """Where a group begins at row `first`: the row after it, and the variants' places. Those of
    one size are one piece of work on a GPU, which would wait for each launch; on a CPU each is
    one alone, for its cache."""
    batches: dict[tuple[int, int, int], list[int]] = {}
    for index, (variant, groups) in enumerate(zip(variants, starts, strict=True)):
        if first in groups:
            stop, columns = groups[first][1], weight[first, variant.columns].numel()
            key = (stop, columns, 0 if weight.is_cuda else index)
            batches.setdefault(key, []).append(index)
    return [(stop, indices) for (stop, _, _), indices in batches.items()]


def _starts(groups: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """By a group's first row: its width, and the row after its last."""
    starts, row = {}, 0
    for bits, rows in groups:
        starts[row] = bits, row + rows
        row += rows
    return starts


class _Grid(NamedTuple):
    """Of each column [N]: the current scale, its inverse (0 for none), and the code of 0."""

    scale: Tensor
    inverse: Tensor
    zero: Tensor

    def set(self, columns: Tensor, scales: Tensor, bits: Sequence[int]) -> None:
        """Of variants of `bits`, scales [V, n] of the columns int64 [V * n]."""
        zeros = torch.tensor([zero_point(width) for width in bits], dtype=scales.dtype)
        inverse = torch.where(scales > 0, 1 / scales, 0.0)
        zero = zeros.to(scales.device)[:, None].expand_as(scales)
        for variant_columns, values in zip(self, (scales, inverse, zero), strict=True):
            variant_columns.index_copy_(0, columns, values.flatten())


@Replay
def _round_block(
    weight: Tensor, feedback: Tensor, scale: Tensor, inverse: Tensor, zero: Tensor
) -> tuple[Tensor, ...]:
    """Rows [rows, N] rounded in turn, each making up for the errors of those before it by
    `feedback` [rows, rows]: the errors that are left, and codes less the code of 0."""
    errors, steps = torch.empty_like(weight), torch.empty_like(weight)
    lowest, highest = -zero, zero - 1
    for i in range(len(weight)):
        step = torch.mul(weight[i], inverse, out=steps[i]).round_()
        torch.clamp(step, lowest, highest, out=step)
        error = torch.addcmul(weight[i], step, scale, value=-1, out=errors[i])
        if i + 1 < len(weight):
            weight[i + 1 :].addr_(feedback[i, i + 1 :], error, alpha=-1)
    return errors, steps
