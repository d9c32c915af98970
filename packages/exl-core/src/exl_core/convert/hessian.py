"""Hessian of a linear's inputs on the calibration rows, and cross moment with the source's inputs.

The quantized layers before a matrix have changed its inputs X. On them, the matrix should come
close to the outputs of the source's matrix W on the source's inputs S. The least-squares solution
is W + (X'X)^-1 (X'S - X'X) W. Rounding this solution instead of W compensates for the errors of
earlier layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.convert.parallel import Workers, allow_bfloat16_matmul

_SPLITS = 4  # row blocks of a product, whatever the number of threads: sums are always equal


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Means over all tokens, float32 on the computing device; K features.

    hessian      X'X [K, K] of the inputs X that the quantized matrix will receive
    cross        X'S [K, K] with the source's inputs S; None if they are equal to X
    first        inputs of the first tokens of the rows [R, K]; None: not told apart from the others
    first_share  their share of all tokens
    """

    hessian: Tensor
    cross: Tensor | None
    first: Tensor | None = None
    first_share: float = 0.0

    def weighted(self, first: float) -> Tensor:
        """The Hessian [K, K] with a weight on the first tokens of the rows. The others have 1. The
        mean over all tokens becomes 1."""
        if self.first is None or first == 1:
            return self.hessian
        mean = self.first_share * first + 1 - self.first_share
        added = self.first.T @ self.first * ((first - 1) * self.first_share / len(self.first))
        return (self.hessian + added) / mean


def measure_hessian(
    inputs: Sequence[Tensor],
    sources: Sequence[Tensor] | None,
    workers: Workers,
) -> InputStatistics:
    """Statistics of `inputs`; `sources` are the source's inputs, or None if they are the same.

    Both are lists of pieces [R, T, K] in any float type. Inputs of an expert are one row, in any
    order.
    """
    features = inputs[0].shape[-1]
    step = -(-features // _SPLITS)
    spans = [slice(first, first + step) for first in range(0, features, step)]
    count = sum(x.shape[0] * x.shape[1] for x in inputs)

    def products(others: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(features, features, device=inputs[0].device)

        def fill(span: slice) -> None:
            for x, other in zip(inputs, others, strict=True):
                total[span].addmm_(x.flatten(0, 1)[:, span].float().T, other.flatten(0, 1).float())

        with allow_bfloat16_matmul():  # the inputs are hardly more precise than bfloat16
            workers.map(fill, spans)
        return total.div_(count)

    hessian, first = products(inputs), torch.cat([x[:, 0] for x in inputs]).float()
    return InputStatistics(
        (hessian + hessian.T) / 2,
        None if sources is None else products(sources),
        first,
        len(first) / count,
    )


def token_hessian(inputs: Sequence[Tensor], tokens: Tensor, workers: Workers) -> Tensor:
    """Hessian [K, K] of the first rows of `inputs`, pieces [R, T, K], with the weights `tokens`
    [rows, T] on their tokens."""
    weighted: list[Tensor] = []
    for x in inputs:
        factors, tokens = tokens[: len(x)].sqrt()[..., None], tokens[len(x) :]
        if len(factors):
            weighted.append(x[: len(factors)] * factors.to(x))
    return measure_hessian(weighted, None, workers).hessian
