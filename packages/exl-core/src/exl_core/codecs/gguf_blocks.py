"""GGUF element formats: their sizes, and what their bytes mean.

The exact dequantization is the `gguf` package's, the format's reference implementation in Python.
Knows bytes and types; knows neither files nor names.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

PLAIN_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def row_bytes(kind: GGMLQuantizationType, columns: int) -> int | None:
    """Bytes of one row of `columns` values; None if a row is not a whole number of blocks."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if columns % block_values:
        return None
    return columns // block_values * block_bytes


def decode(raw: np.ndarray, kind: GGMLQuantizationType) -> Tensor | None:
    """Values of `raw`, uint8 [rows, row_bytes], as [rows, columns].

    Plain types keep their dtype, quantized ones become float32. None if the package knows the
    type's size but not its meaning.
    """
    raw = np.ascontiguousarray(raw)
    dtype = PLAIN_DTYPES.get(kind)
    if dtype is not None:
        return torch.from_numpy(raw).view(dtype)
    try:
        values = dequantize(raw, kind)
    except NotImplementedError:
        return None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
