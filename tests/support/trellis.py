"""Random valid EXL3 layers, with their exact values, independent of the codec and of the op tables.

The decoder walks each ring like a shift register: the state of a position is the one before it,
shifted, with the new bits appended. Two turns around the ring give all states their full history.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from exl_core.ops.weights import Codebook, TrellisColumns, TrellisLayout

MARKERS = {"mcg": -877912083, "mul1": -2082680531}
RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Exl3Layer:
    """EXL3 layer of padded sizes. `has_signs_only`: stored as in old files."""

    words: np.ndarray  # int16 [I/16, N/16, 16 rate]
    in_scales: np.ndarray
    out_scales: np.ndarray
    codebook: Codebook
    has_signs_only: bool = False

    @property
    def parts(self) -> dict[str, Tensor]:
        parts = {"trellis": torch.from_numpy(self.words.copy())}
        if self.codebook in MARKERS:
            parts[self.codebook] = torch.tensor(MARKERS[self.codebook], dtype=torch.int32)
        for name, scales in (("suh", self.in_scales), ("svh", self.out_scales)):
            if self.has_signs_only:
                bits = (scales < 0).reshape(-1, 16).astype(np.uint16) << np.arange(16)
                packed = bits.sum(1).astype(np.uint16).view(np.int16)
                parts[name[:2]] = torch.from_numpy(packed.copy())
            else:
                parts[name] = torch.from_numpy(scales.copy())
        return parts

    @property
    def rate(self) -> float:
        return self.words.shape[2] / 16

    def columns(self, bias: Tensor | None = None) -> TrellisColumns:
        words, in_scales, out_scales = (
            torch.from_numpy(values.copy())
            for values in (self.words, self.in_scales, self.out_scales)
        )
        return TrellisColumns(words, in_scales, out_scales, bias)

    def layout(self, out_features: int, in_features: int) -> TrellisLayout:
        return TrellisLayout(out_features, in_features, self.words.shape[2], self.codebook)

    def rotated(self) -> np.ndarray:
        """The values of the trellis, float16 [in, out]."""
        rows, columns, _ = self.words.shape
        out = np.empty((rows * 16, columns * 16), np.float16)
        states = states_of(self.words)
        for t in range(32):
            for j in range(8):
                row = 2 * (t % 4) + j % 2 + 8 * (j // 2 % 2)
                column = t // 4 + 8 * (j // 4)
                out[row::16, column::16] = values_of(self.codebook)[states[..., 8 * t + j]]
        return out

    def dense(self) -> Tensor:
        """The exact weights, padding included, float64 [in_features, out_features]."""
        rotated = _transformed(self.rotated().astype(np.float64)) * self.in_scales[:, None]
        weights = _transformed(rotated.T).T * self.out_scales
        return torch.from_numpy(weights)


def random_exl3(
    seed: int,
    rate: float,
    codebook: Codebook = "mul1",
    *,
    rows: int = 128,
    columns: int = 128,
    has_signs_only: bool = False,
) -> Exl3Layer:
    """`rows` and `columns` are rounded up to blocks of 128. Weights have an RMS of about 1."""
    rng = np.random.default_rng(seed)
    rows, columns = -(-rows // 128) * 128, -(-columns // 128) * 128
    words = rng.integers(-32768, 32768, (rows // 16, columns // 16, int(16 * rate)))
    signs = [rng.choice([-1.0, 1.0], size) for size in (rows, columns)]
    if not has_signs_only:
        signs = [sign * np.exp2(rng.uniform(-1, 1, len(sign))) for sign in signs]
    in_scales, out_scales = (sign.astype(np.float16) for sign in signs)
    return Exl3Layer(words.astype(np.int16), in_scales, out_scales, codebook, has_signs_only)


def states_of(words: np.ndarray) -> np.ndarray:
    """States [.., 256] of rings, int16 [.., 16 rate]."""
    rate = words.shape[-1] / 16
    stream = words.view(np.uint16).reshape(*words.shape[:-1], -1, 2)[..., ::-1]
    bits = np.unpackbits(np.ascontiguousarray(stream).astype(">u2").view(np.uint8), axis=-1)
    bits = bits.reshape(*words.shape[:-1], -1).astype(np.uint32)
    state: np.ndarray = np.zeros(words.shape[:-1], np.uint32)
    states = np.empty((*words.shape[:-1], 256), np.uint16)
    for _ in range(2):
        end = 0
        for position in range(256):
            count = int(rate + 0.5 * (position % 2))
            for bit in range(end, end + count):
                state = (state << 1 | bits[..., bit]) & 0xFFFF
            end += count
            states[..., position] = state
    return states


@cache
def values_of(codebook: Codebook) -> np.ndarray:
    """Values of all states, float16."""
    state = np.arange(65536, dtype=np.uint32)
    with np.errstate(over="ignore"):
        if codebook == "mul1":
            hashed = state * np.uint32(0x83DCD12D)
            total = hashed.view(np.uint8).reshape(-1, 4).sum(1).astype(np.float32)
            return ((1024 + total) * np.float32(1774 / 2**18) - np.float32(1329 / 128)).astype("f2")
        if codebook == "mcg":
            hashed = state * np.uint32(0xCBAC1FED)
        else:
            hashed = state * np.uint32(89226354) + np.uint32(64248484)
    halves = ((hashed & 0x8FFF8FFF) ^ 0x3B603B60).view(np.float16).reshape(-1, 2)
    return halves[:, 0] + halves[:, 1]


def _transformed(matrix: np.ndarray) -> np.ndarray:
    """The Hadamard transform of each block of 128 rows, by butterflies."""
    blocks = matrix.reshape(-1, 128, matrix.shape[1]).copy()
    step = 1
    while step < 128:
        pairs = blocks.reshape(len(blocks), -1, 2, step, matrix.shape[1])
        blocks = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        step *= 2
    return blocks.reshape(matrix.shape) / np.sqrt(128)
