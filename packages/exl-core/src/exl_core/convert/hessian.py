"""Second moments of a matrix's inputs over the calibration rows, and what it should give for them.

The quantized layers before a matrix have changed its inputs X. What it should do on them is come
close to what the source's matrix W gives on the source's inputs S: least squares, with the solution
W + (X'X)^-1 (X'S - X'X) W. Rounding that rather than W makes up for errors that were made before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.convert.parallel import Workers, allow_bfloat16_matmul

_SPLITS = 4  # of a matrix of moments, whatever the number of threads: sums are always the same


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Means over tokens, float32 on the computing device; K features.

    hessian  X'X [K, K], of the inputs X that the quantized matrix will get
    cross    X'S [K, K], S the source's inputs; None where they are the same
    """

    hessian: Tensor
    cross: Tensor | None


def measure_hessian(
    inputs: Sequence[Tensor],
    sources: Sequence[Tensor] | None,
    workers: Workers,
) -> InputStatistics:
    """`inputs` and `sources`: [R, T, K] of some rows each, in any float type."""
    features = inputs[0].shape[-1]
    step = -(-features // _SPLITS)
    spans = [slice(first, first + step) for first in range(0, features, step)]
    count = sum(x.shape[0] * x.shape[1] for x in inputs)

    def products(others: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(features, features, device=inputs[0].device)

        def fill(span: slice) -> None:
            for x, other in zip(inputs, others, strict=True):
                total[span].addmm_(x.flatten(0, 1)[:, span].float().T, other.flatten(0, 1).float())

        with allow_bfloat16_matmul():  # the inputs are hardly better than bfloat16 anyway
            workers.map(fill, spans)
        return total.div_(count)

    hessian = products(inputs)
    return InputStatistics(
        (hessian + hessian.T) / 2, None if sources is None else products(sources)
    )
