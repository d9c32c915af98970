"""Norms before products on the GPU, and states that they read, as operands of kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from exl_core.ops.backends.cuda.library import TYPES
from exl_core.ops.elementwise import LayerNorm, Norm, RmsNorm
from exl_kernels import cuda
from exl_kernels.cuda_exchange import PartialSums, SharedSums


class PendingRows(NamedTuple):
    """States x plus `sums`, partial sums of all ranks, as inputs of a product after a norm."""

    x: Tensor
    sums: PartialSums | SharedSums
    total: Tensor  # receives x plus the sums

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


def after_layer_norm(x: Tensor, norm: Norm | None) -> tuple[Tensor, RmsNorm | None]:
    """Inputs and norm for kernels that know RMSNorm only: a LayerNorm is computed here."""
    if not isinstance(norm, LayerNorm):
        return x, norm
    return layer_norm(x.float(), x.shape[1:], norm.weight, norm.bias, norm.eps), None


def prepare_args(x: Tensor, norm: Norm | None) -> cuda.Prepare:
    """Arguments of `exl_cuda_prepare` with its inputs and without outputs."""
    rows, columns = x.shape
    args = cuda.Prepare(
        x=x.data_ptr(), x_stride=x.stride(0), x_dtype=TYPES[x.dtype], m=rows, k=columns
    )
    if norm is not None:
        args.norm, args.eps = norm.weight.data_ptr(), norm.eps
    if norm is not None and not isinstance(norm, RmsNorm):
        args.is_layer_norm = 1
        args.norm_bias = None if norm.bias is None else norm.bias.data_ptr()
    return args
