"""Latent attention on the GPU: products of each head by torch, attention by our kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.latent import AbsorbedLatentOps
from exl_core.ops.latent import DenseHeads, HeadMatrices

FIXED_ROWS = 64
"""Rows of torch's products in the batch-invariant mode. The order in which it sums depends on the
number of rows."""


class CudaLatentOps(AbsorbedLatentOps):
    """LatentOps and HeadOps of one GPU."""

    _gpu: Gpu

    def new_head_linear(self, weight: Tensor) -> DenseHeads:
        # Products read [heads, k, n].
        packed = weight.transpose(1, 2).to(self._gpu.device, torch.float16).contiguous()
        return DenseHeads(packed.transpose(1, 2))

    def head_linear(self, x: Tensor, w: HeadMatrices, out: Tensor | None = None) -> Tensor:
        weight = cast(DenseHeads, w).weight.transpose(1, 2)  # [H, k, n]
        x = x.to(torch.float16)
        if self._gpu.is_invariant:
            y = torch.cat([_fixed_product(part, weight) for part in torch.split(x, FIXED_ROWS)])
        else:
            y = torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)  # [m, H, n]
        return y if out is None else out.copy_(y)


def _fixed_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, H, k] times weight [H, k, n], as the first of exactly FIXED_ROWS rows: [m, H, n]."""
    padded = x.new_zeros(FIXED_ROWS, *x.shape[1:])
    padded[: len(x)] = x
    return torch.bmm(padded.transpose(0, 1), weight).transpose(0, 1)[: len(x)]
