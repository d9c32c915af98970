"""Hessian of a matrix's outputs: what errors of several outputs at once cost.

An error E [I, N] of a matrix costs tr(E' A E G) with the Hessian A of its inputs and the mean G of
g g' over tokens, g being the gradient of an output vector (YAQA, Tseng et al. 2025,
arXiv 2505.22988). With G, errors of some outputs make up for those of others.

G is kept in blocks on its diagonal, of at most `BLOCK` outputs. Its diagonal holds the
sensitivities of single outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from exl_core.convert.hessian import measure_hessian
from exl_core.convert.parallel import Workers
from exl_core.formats.codecs.exl3.matrix import stored_size

BLOCK = 1024
"""Most outputs in a block. A work directory has two bytes for each pair of them, and the time to
factorize a block grows with the cube of its width."""

LEAST_WEIGHT = 0.05
"""Share of the mean weight of errors that is added to the weight of each output. It limits the
errors of outputs whose weight is close to zero on the calibration text."""


def block_width(outputs: int) -> int:
    """Outputs in each block, a multiple of 128; the last block may have fewer."""
    blocks = -(-outputs // BLOCK)
    return stored_size(-(-outputs // blocks))


def pair_values(outputs: int) -> int:
    """Number of values of the blocks of a matrix."""
    width = block_width(outputs)
    return -(-outputs // width) * width**2


class OutputHessian(NamedTuple):
    """Weights of errors in N' outputs, with a mean of 1 over those of the matrix.

    diagonal  float64 [N'], of squares
    blocks    float64 [B, W, W], of products, with this diagonal, padded with zeros to B W >= N';
              None: errors of different outputs do not interact
    """

    diagonal: Tensor
    blocks: Tensor | None

    def to(self, device: torch.device) -> OutputHessian:
        blocks = None if self.blocks is None else self.blocks.to(device)
        return OutputHessian(self.diagonal.to(device), blocks)

    def times(self, x: Tensor) -> Tensor:
        """x [.., N'] times this matrix."""
        if self.blocks is None:
            return x * self.diagonal
        count, width = self.blocks.shape[:2]
        padded = pad(x, (0, count * width - x.shape[-1])).view(-1, count, width).transpose(0, 1)
        product = (padded @ self.blocks).transpose(0, 1)
        return product.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def output_hessian(
    importance: Tensor | None, correlation: Tensor | None, outputs: int
) -> OutputHessian:
    """Weights for a matrix with `outputs` columns, padding included, from the mean squares of the
    gradients of its outputs, and their correlations (`sensitivity.py`). Equal weights if there are
    none, or if their mean is not finite and positive."""
    diagonal = torch.ones(outputs, dtype=torch.float64)
    mean = 0.0 if importance is None else float(importance.double().mean())
    if importance is None or not (math.isfinite(mean) and mean > 0):
        return OutputHessian(diagonal, None)
    own = importance.double().cpu() / mean
    diagonal[: len(own)] = (own + LEAST_WEIGHT) / (1 + LEAST_WEIGHT)
    if correlation is None:
        return OutputHessian(diagonal, None)
    count, width = correlation.shape[:2]
    size = pad(own.sqrt(), (0, count * width - len(own))).view(count, width)
    blocks = correlation.double().cpu() / (1 + LEAST_WEIGHT)
    blocks = blocks * size[:, :, None] * size[:, None]
    filled = pad(diagonal, (0, count * width - outputs)).view(count, width)
    torch.diagonal(blocks, dim1=1, dim2=2).copy_(filled)
    return OutputHessian(diagonal, blocks)


class PairSums:
    """Sums over calibration rows of the products of the gradients of two outputs.

    `order` [N] are the outputs in the order of the file, on the CPU.
    """

    def __init__(self, order: Tensor, device: torch.device, workers: Workers) -> None:
        self._order = order
        self._workers = workers
        width = block_width(len(order))
        self._columns = [columns.to(device) for columns in torch.split(order, width)]
        self._sums = torch.zeros(len(self._columns), width, width, device=device)
        self._rows = 0

    def add(self, gradients: Tensor) -> None:
        """Adds the mean over the gradients [T, N] of some tokens of a row."""
        if not len(gradients):
            return
        self._rows += 1
        for block, columns in enumerate(self._columns):
            own = gradients[None, :, columns]
            products = measure_hessian([own], None, self._workers).hessian
            self._sums[block, : len(columns), : len(columns)] += products

    def correlations(self, squares: Tensor) -> Tensor:
        """Mean products over the roots of the products of the outputs' mean `squares` [N], float16
        [B, W, W]. Zeros if there are no gradients."""
        count, width = self._sums.shape[:2]
        sizes = squares[self._order].to(self._sums.device)
        sizes = pad(sizes, (0, count * width - len(sizes))).view(count, width).sqrt()
        scale = (1 / sizes).nan_to_num(0.0, 0.0, 0.0)
        return (self._sums / max(self._rows, 1) * scale[:, :, None] * scale[:, None]).half().cpu()
