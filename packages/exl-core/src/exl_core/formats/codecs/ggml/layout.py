"""GGUF element formats: their sizes, and exact dequantization of their blocks.

The dequantization is that of the `gguf` package, the format's reference implementation in Python.
Knows bytes and types. Knows neither files nor names.
"""

from __future__ import annotations

from typing import NamedTuple

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


REMOVED_TYPES = {
    **{4: "Q4_2", 5: "Q4_3"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
"""Ids of types that llama.cpp no longer reads either."""


class BlockGroup(NamedTuple):
    """Bit width of the codes, and number of codes that share a scale."""

    bits: int
    rows: int


GROUPS = {
    GGMLQuantizationType.Q4_0: BlockGroup(4, 32),
    GGMLQuantizationType.Q4_1: BlockGroup(4, 32),
    GGMLQuantizationType.Q5_0: BlockGroup(5, 32),
    GGMLQuantizationType.Q5_1: BlockGroup(5, 32),
    GGMLQuantizationType.Q8_0: BlockGroup(8, 32),
    GGMLQuantizationType.Q2_K: BlockGroup(2, 16),
    GGMLQuantizationType.Q3_K: BlockGroup(3, 16),
    GGMLQuantizationType.Q4_K: BlockGroup(4, 32),
    GGMLQuantizationType.Q5_K: BlockGroup(5, 32),
    GGMLQuantizationType.Q6_K: BlockGroup(6, 16),
    GGMLQuantizationType.IQ4_NL: BlockGroup(4, 32),
    GGMLQuantizationType.IQ4_XS: BlockGroup(4, 32),
    GGMLQuantizationType.MXFP4: BlockGroup(4, 32),
}


def row_bytes(kind: GGMLQuantizationType, columns: int) -> int | None:
    """Bytes of a row of `columns` values; None if a row is not a whole number of blocks."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if columns % block_values:
        return None
    return columns // block_values * block_bytes


def decode(raw: Tensor, kind: GGMLQuantizationType) -> Tensor | None:
    """Decodes `raw`: values [rows, columns] of a plain type, or bytes, uint8 [rows, row_bytes].

    Plain values are returned as they are. Bytes are dequantized to float32 [rows, columns]. Returns
    None if the package knows the type's size, but cannot dequantize it.
    """
    if kind in PLAIN_DTYPES:
        return raw.contiguous()
    try:
        with np.errstate(all="ignore"):  # a scale may be NaN; the caller checks the values
            values = dequantize(raw.contiguous().numpy(), kind)
    except NotImplementedError:
        return None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
