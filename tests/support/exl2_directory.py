"""Independent reader of EXL2 directories for tests, written from the format's description.

It uses nothing of `exl_core`: it parses files byte by byte and unpacks codes with numpy. Every rule
that the reference program (exllamav2) relies on is an assertion. Unknown content fails.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np

TYPES = {"F16": "<f2", "F32": "<f4", "I32": "<i4", "I16": "<i2"}  # all dtypes of the format
PARTS = {"q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm"}


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of every `.safetensors` file. The reference program reads all of them too."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        assert "__metadata__" not in header
        end = 0
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            assert start == end, f"{name}: no gaps"
            end = stop
            values = np.frombuffer(
                data[8 + length + start : 8 + length + stop], TYPES[entry["dtype"]]
            )
            assert values.size == math.prod(entry["shape"])
            assert name not in tensors
            tensors[name] = values.reshape(entry["shape"])
        assert 8 + length + end == len(data)
    return tensors


NUMBERS = (
    *("correction_bias", "expert_bias", "per_expert_scale", "self_attn.sinks"),
    *("conv1d.weight", "conv.conv.weight", "linear_attn.norm.weight", "mamba.norm.weight"),
    *("mixer.norm.weight", "self_attn.o_norm.weight", "A_log", "dt_bias", "mamba.D", "mixer.D"),
)
"""Endings of the names of numbers in float32: those of routers decide between scores that differ
little, and those of recurrent layers act on every later token."""


def read_model(folder: Path) -> dict[str, np.ndarray]:
    """Dequantized matrices [in, out] as `<stem>.weight`, and all other tensors as stored."""
    tensors = read_tensors(folder)
    stems = {name.removesuffix(".q_weight") for name in tensors if name.endswith(".q_weight")}
    model: dict[str, np.ndarray] = {}
    for stem in stems:
        parts = {part: tensors.pop(f"{stem}.{part}") for part in PARTS}
        model[f"{stem}.weight"] = multiply_out(parts)
    assert not [name for name in tensors if name.rpartition(".")[2].startswith("q_")]
    for name, values in tensors.items():
        assert values.dtype == (np.float32 if name.endswith(NUMBERS) else np.float16), name
    return {**model, **tensors}


def multiply_out(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Dequantize one matrix to float16 [in, out]."""
    words, scales, largest = parts["q_weight"], parts["q_scale"], parts["q_scale_max"]
    rows_of_words, columns = words.shape
    count = scales.shape[0]
    assert columns % 32 == 0
    assert scales.shape == (count, columns // 8)
    assert largest.shape == (count,)
    assert largest.dtype == np.float16
    assert np.isfinite(largest).all()
    table = parts["q_groups"].reshape(count, 2).astype(int)
    widths, starts = table[:, 0], table[:, 1]
    assert set(widths) <= {2, 3, 4, 5, 6, 8}
    assert (np.diff(widths) <= 0).all()
    assert starts[0] == 0
    assert (np.diff(starts) > 0).all()
    ends = [*starts[1:], rows_of_words]
    invperm = parts["q_invperm"]
    in_features = len(invperm)
    assert in_features % 32 == 0
    assert sorted(invperm) == list(range(in_features))
    stored = []
    for group, (bits, start, end) in enumerate(zip(widths, starts, ends, strict=True)):
        rows = (end - start) * 32 // bits
        assert rows % 32 == 0
        codes = unpack(words[start:end], bits)  # [rows, columns]
        nibbles = unpack(scales[group : group + 1].T, 4)  # [8, columns / 8], lowest first
        squares = (nibbles.T.reshape(-1).astype(np.float32) + 1) ** 2
        step = (largest[group].astype(np.float32) / np.float32(256)).astype(np.float16)
        scale = (squares.astype(np.float16) * step).astype(np.float16)
        centered = (codes.astype(np.int32) - (1 << bits - 1)).astype(np.float16)
        stored.append(centered * scale)
    weight = np.concatenate(stored)
    assert len(weight) == in_features
    return weight[invperm]


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes [words * 32 / bits, columns] of little-endian streams down the columns."""
    columns = np.ascontiguousarray(words.T.astype("<i4"))
    stream = np.unpackbits(columns.view(np.uint8), axis=1, bitorder="little")
    digits = stream.reshape(len(columns), -1, bits)
    return (digits.astype(np.int64) << np.arange(bits)).sum(2).T
