"""Norms before products on the GPU, as operands of kernels."""

from __future__ import annotations

from torch import Tensor, float32
from torch.nn.functional import layer_norm

from exl_core.ops.backends.cuda.library import TYPES
from exl_core.ops.backends.cuda.quantized import CudaQuantLinear
from exl_core.ops.elementwise import LayerNorm, Norm, RmsNorm
from exl_kernels import cuda


def row_norm(
    x: Tensor, norm: Norm | None, parts: tuple[CudaQuantLinear, ...]
) -> cuda.RowNorm | None:
    """Operand of `exl_cuda_norm_linear`, which needs no launch for the norm of a single row x; None
    if it cannot compute this product."""
    rows, features = x.shape
    places, order = parts[0].inverse_permutation, parts[0].permutation.data_ptr()
    is_short = rows == 1 and features % 8 == 0 and features <= cuda.MAX_NORM_FEATURES
    if not isinstance(norm, RmsNorm) or not is_short or places is None or x.dtype is not float32:
        return None
    operands = x.data_ptr(), norm.weight.data_ptr(), places.data_ptr()
    is_aligned = all(operand % 16 == 0 for operand in operands)
    if not is_aligned or any(part.permutation.data_ptr() != order for part in parts):
        return None
    return cuda.RowNorm(*operands, norm.eps)


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
