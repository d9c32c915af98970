"""Reference values of columns of matrices, computed bit by bit in numpy from `ops/weights.py`.

Shares no code with the codecs or the op tables, so that a mistake there and one here do not cancel.
Products and sums are float64, which stands for a table without rounding.
"""

from __future__ import annotations

import gguf
import numpy as np
from torch import Tensor

from exl_core.formats.codecs.runtime import RuntimeMatrix
from exl_core.ops.weights import (
    DenseColumns,
    GroupedColumns,
    GroupedLayout,
    WeightColumns,
    WeightLayout,
)

IQ4_NL = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.float64)  # of another implementation
MXFP4 = np.array(gguf.quants.MXFP4.kvalues, dtype=np.float64) / 2  # likewise
E4M3 = np.array(  # number of each byte: sign, 4 bits of exponent, 3 of mantissa
    [
        (-1.0) ** (byte >> 7)
        * (byte % 8 + (8 if byte & 0x78 else 0))
        * 2.0 ** (max(byte >> 3 & 15, 1) - 10)
        for byte in range(256)
    ]
)
NUMBERS = {"e4m3": E4M3, "iq4_nl": IQ4_NL, "mxfp4": MXFP4}
GGML_CODES = {"q4_0": (4, 1), "q4_1": (4, 2), "q5_0": (5, 1), "q5_1": (5, 2), "q8_0": (8, 1)}


def evaluate(matrix: RuntimeMatrix, step: int = 32) -> np.ndarray:
    """The whole matrix, float64 [in_features, out_features], read `step` columns at a time."""
    count = matrix.layout.out_features
    ranges = [(first, min(first + step, count)) for first in range(0, count, step)]
    parts = [weights(matrix.layout, matrix.columns(*columns)) for columns in ranges]
    return np.concatenate(parts, axis=1)


def weights(layout: WeightLayout, columns: WeightColumns) -> np.ndarray:
    """float64 [in_features, columns], in the order of the input features (permutation undone)."""
    if isinstance(columns, DenseColumns):
        assert columns.weight.dtype is layout.dtype
        return columns.weight.double().numpy().T
    assert isinstance(layout, GroupedLayout)
    assert isinstance(columns, GroupedColumns)
    stored = _ggml(columns) if columns.packing in GGML_CODES else _grouped(layout, columns)
    if layout.features is None:
        return stored
    by_feature = np.full_like(stored, np.nan)
    by_feature[layout.features.numpy()] = stored
    assert not np.isnan(by_feature).any(), "every feature once"
    return by_feature


def _grouped(layout: GroupedLayout, columns: GroupedColumns) -> np.ndarray:
    codes = _codes(layout, columns)
    if columns.source_rows is not None:
        codes = codes[columns.source_rows.numpy()]
    assert columns.scales is not None
    assert columns.scales.dtype is layout.scale_dtype
    scales = columns.scales.double().numpy()
    offsets = None if columns.offsets is None else columns.offsets.double().numpy()
    stored = np.empty(codes.shape)
    row = group = 0
    for run in layout.runs:
        for _ in range(run.groups):
            part = codes[row : row + run.rows].astype(np.float64)
            if not layout.has_integers:
                numbers = NUMBERS[layout.formula][part.astype(np.int64)]
                is_exponent = layout.formula == "mxfp4"
                factors = 2.0 ** (scales[group] - 127) if is_exponent else scales[group]
                stored[row : row + run.rows] = factors * numbers
            elif layout.formula == "minimums":
                assert offsets is not None
                stored[row : row + run.rows] = scales[group] * part + offsets[group]
            else:
                zero = 2.0 ** (run.bits - 1) if offsets is None else offsets[group]
                stored[row : row + run.rows] = scales[group] * (part - zero)
            row, group = row + run.rows, group + 1
    assert (row, group) == (layout.in_features, len(scales))
    return stored


def _codes(layout: GroupedLayout, columns: GroupedColumns) -> np.ndarray:
    """Codes [rows of the file, columns]."""
    if columns.packing == "bytes":
        return columns.codes.numpy()
    assert columns.codes.stride(1) == 1
    widths = [run.bits for run in layout.runs for _ in range(run.groups * run.rows)]
    return np.stack([_stream(column, widths) for column in columns.codes.T], axis=1)


def _stream(words: Tensor, widths: list[int]) -> list[int]:
    """Codes of one column: one long integer, lowest bits first."""
    data = words.contiguous().numpy().astype("<i4").tobytes()
    stream = int.from_bytes(data, "little")
    codes = []
    for bits in widths:
        codes.append(stream & (1 << bits) - 1)
        stream >>= bits
    assert stream == 0, "bits are left"
    return codes


def _ggml(columns: GroupedColumns) -> np.ndarray:
    bits, factors = GGML_CODES[columns.packing]
    size = 2 * factors + 4 * bits
    blocks = columns.codes.numpy().reshape(columns.codes.shape[0], -1, size)
    head = np.ascontiguousarray(blocks[..., : 2 * factors]).view(np.float16).astype(np.float64)
    body = blocks[..., 2 * factors :]
    if bits == 8:
        codes = np.ascontiguousarray(body).view(np.int8).astype(np.float64)
    else:
        nibbles = body[..., -16:]
        whole = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.int64)
        if bits == 5:
            high = np.unpackbits(np.ascontiguousarray(body[..., :4]), axis=-1, bitorder="little")
            whole += 16 * high.astype(np.int64)
        codes = whole.astype(np.float64) - (0 if factors == 2 else 2 ** (bits - 1))
    values = head[..., :1] * codes + (head[..., 1:] if factors == 2 else 0)
    return values.reshape(values.shape[0], -1).T


def half_ulp(values: Tensor) -> np.ndarray:
    """Largest rounding error that each of these rounded values can have."""
    return np.spacing(np.abs(values.numpy())).astype(np.float64) / 2
