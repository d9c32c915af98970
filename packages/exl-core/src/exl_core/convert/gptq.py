"""GPTQ: codes of one matrix that change its outputs least on given inputs.

The method is GPTQ (Frantar et al. 2022, arXiv 2210.17323) with act-order: rows are stored and
rounded in order of falling input energy, and the error of a row is compensated by the rows after
it. With the Hessian H of the inputs and the error E of the weights, the cost is tr(E' H E).
Factoring H = R R' with R upper triangular makes it a sum over rows of
(remaining error of the row)^2 * R_ii^2.

Matrices with the same inputs, and candidate layouts of one matrix, are processed side by side as
columns of one matrix. Only H couples rows. Only the largest scale of a group couples columns.

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
DAMPING = 0.1
"""Share of the mean diagonal that is added to the diagonal. A smaller share gives better results on
the calibration text and worse results on other text."""

DAMPING_STEPS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # multiples of the damping, tried in order


class Factor(NamedTuple):
    """Factorization of the damped Hessian, in the order of the stored rows.

    order      int64 [K]: input feature of each stored row
    feedback   [K, K] upper triangular: row i holds the corrections that the other stored rows
               subtract for a unit error of stored row i
    curvature  [K]: R_ii^2, cost of a unit error that remains in a stored row
    damping    number added to the diagonal, as a share of its mean
    """

    order: Tensor
    feedback: Tensor
    curvature: Tensor
    damping: float


def factorize(hessian: Tensor, damping: float = DAMPING) -> Factor | None:
    """Factors `hessian` [K, K]; None if no step of `DAMPING_STEPS` makes it positive definite."""
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    mean = float(diagonal.double().mean())
    if not mean > 0 or not torch.isfinite(hessian).all():
        return None
    # R R' = H with R upper triangular: a Cholesky factorization with reversed rows and columns.
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
    """Hessian with `damping` times its mean diagonal added to the diagonal."""
    return hessian + torch.eye(len(hessian)).to(hessian) * hessian.diagonal().mean() * damping


def identity_factor(features: int, device: torch.device) -> Factor:
    """Factor of an unusable Hessian: rounding to nearest, in the features' own order."""
    eye = torch.eye(features, device=device)
    return Factor(torch.arange(features, device=device), eye, eye.diagonal(), 0.0)


class Variant(NamedTuple):
    """One matrix in one layout: columns that share their groups and each group's largest scale.
    `groups` are pairs (bits, rows). `curvature` [K] replaces that of the factor in the cost."""

    columns: slice
    groups: Sequence[tuple[int, int]]
    curvature: Tensor | None = None


class Rounded(NamedTuple):
    """Result of `quantize_columns` for V variants; rows are in stored order.

    codes   uint8 [K, N]
    scales  for each variant, scale codes uint8 [G, n] and largest scales float16 [G]
    weight  float32 [K, N], the dequantized weights before their rounding to float16
    cost    [K / 32, V], cost of the remaining errors in each block of 32 rows
    """

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
    """Quantizes `weight` [K, N], whose rows are in stored order. The variants cover all columns.

    `trials` is the number of scales tried for each group and column. `column_weights` [N] weight
    the columns in `cost` and change nothing else. `check` is called every 32 rows and may raise.
    """
    adjusted = weight.clone()
    features, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    rounded = torch.empty_like(weight)
    grid = _Grid(*(weight.new_empty(columns) for _ in range(3)))
    starts = [_starts(variant.groups) for variant in variants]
    scales_by_variant: list[list[GroupScales]] = [[] for _ in variants]
    positions = torch.arange(columns, device=weight.device)
    costs, curvatures = [], _curvatures(factor, variants)
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
        if curvatures is None:
            costs.append(factor.curvature[block] @ errors.square())  # [N]
        else:
            of_variants, variant_of = curvatures
            costs.append((of_variants[block][:, variant_of] * errors.square()).sum(0))
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


def cost_curvature(factor: Factor, hessian: Tensor) -> Tensor:
    """Cost [K] of a unit error that remains in each stored row, on another Hessian than that of the
    feedback, if the remaining errors of the rows are independent: the diagonal of F H F' for the
    feedback F. `hessian` [K, K] is in the order of the features."""
    own = hessian[factor.order][:, factor.order]
    cost: Tensor = ((factor.feedback @ own) * factor.feedback).sum(1)
    return cost


def _curvatures(factor: Factor, variants: Sequence[Variant]) -> tuple[Tensor, Tensor] | None:
    """Curvatures of the variants [K, V], and the variant of each column, int64 [N]; None: that of
    the factor for all."""
    if all(variant.curvature is None for variant in variants):
        return None
    own = [factor.curvature if one.curvature is None else one.curvature for one in variants]
    sizes = torch.tensor([one.columns.stop - one.columns.start for one in variants])
    columns = torch.arange(len(variants)).repeat_interleave(sizes)
    return torch.stack(own, 1), columns.to(factor.curvature.device)


def _groups_starting_at(
    variants: Sequence[Variant],
    starts: Sequence[Mapping[int, tuple[int, int]]],
    first: int,
    weight: Tensor,
) -> list[tuple[int, list[int]]]:
    """Groups that begin at row `first`: pairs of the row after the group and the variants' indices.

    On a GPU, groups of one size form one pair, because the launches take more time than the
    computation. On a CPU each group is a pair of its own, so that it fits into the cache.
    """
    batches: dict[tuple[int, int, int], list[int]] = {}
    for index, (variant, groups) in enumerate(zip(variants, starts, strict=True)):
        if first in groups:
            stop, columns = groups[first][1], weight[first, variant.columns].numel()
            key = (stop, columns, 0 if weight.is_cuda else index)
            batches.setdefault(key, []).append(index)
    return [(stop, indices) for (stop, _, _), indices in batches.items()]


def _starts(groups: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Width of each group and the row after it, by the group's first row."""
    starts, row = {}, 0
    for bits, rows in groups:
        starts[row] = bits, row + rows
        row += rows
    return starts


class _Grid(NamedTuple):
    """Each column's current scale, the scale's inverse (0 for a scale of 0), and code of 0: [N]."""

    scale: Tensor
    inverse: Tensor
    zero: Tensor

    def set(self, columns: Tensor, scales: Tensor, bits: Sequence[int]) -> None:
        """Sets `columns` int64 [V * n] to `scales` [V, n] of V variants with the widths `bits`."""
        zeros = torch.tensor([zero_point(width) for width in bits], dtype=scales.dtype)
        inverse = torch.where(scales > 0, 1 / scales, 0.0)
        zero = zeros.to(scales.device)[:, None].expand_as(scales)
        for variant_columns, values in zip(self, (scales, inverse, zero), strict=True):
            variant_columns.index_copy_(0, columns, values.flatten())


@Replay
def _round_block(
    weight: Tensor, feedback: Tensor, scale: Tensor, inverse: Tensor, zero: Tensor
) -> tuple[Tensor, ...]:
    """Rounds the rows of `weight` [rows, N] one by one. The error of a row corrects the rows after
    it through `feedback` [rows, rows]. Returns the remaining errors, and the codes minus the code
    of 0."""
    errors, steps = torch.empty_like(weight), torch.empty_like(weight)
    lowest, highest = -zero, zero - 1
    for i in range(len(weight)):
        step = torch.mul(weight[i], inverse, out=steps[i]).round_()
        torch.clamp(step, lowest, highest, out=step)
        error = torch.addcmul(weight[i], step, scale, value=-1, out=errors[i])
        if i + 1 < len(weight):
            weight[i + 1 :].addr_(feedback[i, i + 1 :], error, alpha=-1)
    return errors, steps
