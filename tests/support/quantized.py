"""Random valid layers in the formats of quantized checkpoints, with their exact dequantized values.

Independent of `exl_core.formats.codecs` and slow: built from the definition of the formats, with
the codes of a column as one long integer and values in numpy's float16 arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from support.runtime_form import E4M3

Groups = Sequence[tuple[int, int]]  # (bits, rows)


def pack_columns(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [rows * bits / 32, n] of codes [rows, n]."""
    size = codes.shape[0] * bits // 8
    columns = []
    for column in codes.T.tolist():
        stream = sum(code << bits * i for i, code in enumerate(column))
        columns.append(np.frombuffer(stream.to_bytes(size, "little"), dtype="<u4"))
    return np.stack(columns, axis=1)


def as_int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).astype(np.uint32).view(np.int32))


@dataclass(frozen=True)
class Exl2Layer:
    """EXL2 layer. `codes` are in the order of stored rows; `scale_codes` are 0 .. 15."""

    groups: Groups
    codes: np.ndarray
    scale_codes: np.ndarray
    scale_max: np.ndarray
    invperm: np.ndarray

    @property
    def parts(self) -> dict[str, Tensor]:
        words: list[np.ndarray] = []
        table: list[int] = []
        row = 0
        for bits, rows in self.groups:
            table += [bits, sum(len(part) for part in words)]
            words.append(pack_columns(self.codes[row : row + rows], bits))
            row += rows
        return {
            "q_weight": as_int32(np.concatenate(words)),
            "q_scale": as_int32(pack_columns(self.scale_codes.T, 4).T),
            "q_scale_max": torch.from_numpy(self.scale_max.copy()),
            "q_groups": torch.tensor(table, dtype=torch.int16),
            "q_invperm": torch.from_numpy(self.invperm.astype(np.int32)),
        }

    def dense(self, prescale: float = 1.0) -> Tensor:
        """The exact weights, float16 [in_features, out_features]."""
        step = (self.scale_max.astype(np.float32) * np.float32(prescale / 256)).astype(np.float16)
        squares = ((self.scale_codes + 1) ** 2).astype(np.float16)
        scales = squares * step[:, None]
        stored, row = [], 0
        for (bits, rows), scale in zip(self.groups, scales, strict=True):
            centered = self.codes[row : row + rows].astype(np.float16) - np.float16(1 << bits - 1)
            stored.append(centered * scale)
            row += rows
        return torch.from_numpy(np.concatenate(stored)[self.invperm])


def random_exl2(seed: int, groups: Groups, columns: int = 32) -> Exl2Layer:
    rng = np.random.default_rng(seed)
    rows = sum(count for _, count in groups)
    shape = (len(groups), columns)
    codes = [rng.integers(0, 1 << bits, (count, columns)) for bits, count in groups]
    return Exl2Layer(
        groups=groups,
        codes=np.concatenate(codes),
        scale_codes=rng.integers(0, 16, shape),
        scale_max=np.exp2(rng.uniform(-18, 2, len(groups))).astype(
            np.float16
        ),  # includes subnormals
        invperm=rng.permutation(rows),
    )


@dataclass(frozen=True)
class GptqLayer:
    """GPTQ layer. `group_of_row` is the group of each feature; `zeros` are the zero points."""

    bits: int
    group_size: int
    is_v2: bool
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of_row: np.ndarray

    @property
    def parts(self) -> dict[str, Tensor]:
        return {
            "qweight": as_int32(pack_columns(self.codes, self.bits)),
            "qzeros": as_int32(self._stored_zeros()),
            "scales": torch.from_numpy(self.scales.copy()),
            "g_idx": torch.from_numpy(self.group_of_row.astype(np.int32)),
        }

    def _stored_zeros(self) -> np.ndarray:
        if self.is_v2:
            return pack_columns(self.zeros.T, self.bits).T
        if self.bits == 3:
            return pack_columns((self.zeros.T - 1) % 8, self.bits).T
        ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[self.bits]
        words = pack_columns(self.zeros.T, self.bits).T.astype(np.int64)
        return (words - ones) % (1 << 32)  # borrows across fields, as GPTQ writers do

    def dense(self) -> Tensor:
        """The exact weights, float16 [in_features, out_features]."""
        weight = np.empty(self.codes.shape, dtype=np.float16)
        for k, group in enumerate(self.group_of_row):
            weight[k] = self.scales[group] * (self.codes[k] - self.zeros[group]).astype(np.float16)
        return torch.from_numpy(weight)

    def config(self) -> dict[str, object]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": not bool(np.all(np.diff(self.group_of_row) >= 0)),
            "sym": False,
            "checkpoint_format": "gptq_v2" if self.is_v2 else "gptq",
        }


def random_gptq(
    seed: int,
    bits: int,
    group_size: int,
    *,
    rows: int,
    columns: int = 32,
    is_v2: bool = False,
    has_act_order: bool = False,
    is_symmetric: bool = False,
) -> GptqLayer:
    rng = np.random.default_rng(seed)
    group_of_row = np.arange(rows) // (rows if group_size == -1 else group_size)
    shape = (int(group_of_row[-1]) + 1, columns)
    zeros = rng.integers(0, 1 << bits, shape)
    return GptqLayer(
        bits=bits,
        group_size=group_size,
        is_v2=is_v2,
        codes=rng.integers(0, 1 << bits, (rows, columns)),
        zeros=np.full(shape, 1 << bits - 1) if is_symmetric else zeros,
        scales=np.exp2(rng.uniform(-22, 1, shape)).astype(np.float16),  # includes subnormals
        group_of_row=rng.permutation(group_of_row) if has_act_order else group_of_row,
    )


@dataclass(frozen=True)
class AwqLayer:
    """AWQ layer: codes [in_features, out_features], zero points and scales of each group."""

    group_size: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray

    @property
    def parts(self) -> dict[str, Tensor]:
        return {
            "qweight": as_int32(pack_awq(self.codes)),
            "qzeros": as_int32(pack_awq(self.zeros)),
            "scales": torch.from_numpy(self.scales.copy()),
        }

    def dense(self) -> Tensor:
        """The exact weights, float32 [in_features, out_features]."""
        groups = np.arange(len(self.codes)) // self.group_size
        centered = (self.codes - self.zeros[groups]).astype(np.float32)
        return torch.from_numpy(self.scales[groups].astype(np.float32) * centered)

    def config(self) -> dict[str, object]:
        return {"quant_method": "awq", "bits": 4, "group_size": self.group_size, "version": "gemm"}


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """uint32 [rows, n / 8] of codes [rows, n], by AutoAWQ's order: field i of a word holds column
    0, 2, 4, 6, 1, 3, 5, 7 of its eight columns."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return words


def random_awq(
    seed: int, group_size: int, *, rows: int, columns: int = 32, is_symmetric: bool = False
) -> AwqLayer:
    rng = np.random.default_rng(seed)
    shape = (rows // group_size, columns)
    return AwqLayer(
        group_size=group_size,
        codes=rng.integers(0, 16, (rows, columns)),
        zeros=np.full(shape, 8) if is_symmetric else rng.integers(0, 16, shape),
        scales=np.exp2(rng.uniform(-22, 1, shape)).astype(np.float16),
    )


@dataclass(frozen=True)
class CompressedLayer:
    """Packed compressed-tensors layer: codes [out_features, in_features], zero points (None:
    symmetric) and scales [out_features, groups]. `group_of_row` is the group of each feature."""

    bits: int
    group_size: int | None
    codes: np.ndarray
    zeros: np.ndarray | None
    scales: Tensor
    group_of_row: np.ndarray

    @property
    def parts(self) -> dict[str, Tensor]:
        parts = {
            "weight_packed": as_int32(pack_columns(self.codes.T, self.bits).T),
            "weight_scale": self.scales.clone(),
            "weight_shape": torch.tensor(self.codes.shape),
        }
        if self.zeros is not None:
            parts["weight_zero_point"] = as_int32(pack_columns(self.zeros, self.bits))
        if np.any(np.diff(self.group_of_row) < 0):
            parts["weight_g_idx"] = torch.from_numpy(self.group_of_row.astype(np.int32))
        return parts

    def dense(self) -> Tensor:
        """The exact weights, float32 [in_features, out_features]."""
        middle = 1 << (self.bits - 1)
        zeros = middle if self.zeros is None else self.zeros[:, self.group_of_row]
        scales = self.scales.float().numpy()[:, self.group_of_row]
        return torch.from_numpy((scales * (self.codes - zeros).astype(np.float32)).T.copy())

    def config(self) -> dict[str, object]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.zeros is None,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }


def random_compressed(
    seed: int,
    bits: int,
    group_size: int | None,
    *,
    rows: int,
    columns: int = 32,
    is_symmetric: bool = True,
    has_act_order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> CompressedLayer:
    rng = np.random.default_rng(seed)
    group_of_row = np.arange(rows) // (group_size or rows)
    shape = (columns, int(group_of_row[-1]) + 1)
    return CompressedLayer(
        bits=bits,
        group_size=group_size,
        codes=rng.integers(0, 1 << bits, (columns, rows)),
        zeros=None if is_symmetric else rng.integers(0, 1 << bits, shape),
        scales=torch.from_numpy(np.exp2(rng.uniform(-22, 1, shape))).to(dtype),
        group_of_row=rng.permutation(group_of_row) if has_act_order else group_of_row,
    )


@dataclass(frozen=True)
class Fp8Layer:
    """FP8 matrix: codes of one byte [out_features, in_features], and scales as stored."""

    codes: np.ndarray
    scales: Tensor
    name: str  # of the scales
    block: tuple[int, int] | None

    @property
    def parts(self) -> dict[str, Tensor]:
        codes = torch.from_numpy(self.codes.astype(np.uint8))
        return {"weight": codes.view(torch.float8_e4m3fn), self.name: self.scales.clone()}

    def dense(self) -> Tensor:
        """The exact weights, float64 [in_features, out_features]."""
        scales = self.scales.double().numpy()
        rows, columns = self.codes.shape
        if scales.size == 1:
            scales = scales.reshape(1, 1)
        elif self.block is None:
            scales = scales.reshape(rows, 1)
        else:
            scales = scales[np.arange(rows) // self.block[0]]
            scales = scales[:, np.arange(columns) // self.block[1]]
        return torch.from_numpy((E4M3[self.codes] * scales).T.copy())

    def config(self) -> dict[str, object]:
        config: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        return config if self.block is None else config | {"weight_block_size": [*self.block]}


def random_fp8(
    seed: int,
    block: tuple[int, int] | None,
    *,
    rows: int,
    columns: int = 32,
    name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
) -> Fp8Layer:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (columns, rows))
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN; the largest number instead
    shape = (columns, 1)
    if block is not None:
        shape = (-(-columns // block[0]), -(-rows // block[1]))
    scales = torch.from_numpy(np.exp2(rng.uniform(-14, -6, shape))).to(dtype)
    return Fp8Layer(codes, scales, name, block)


def bit_pattern(tensor: Tensor) -> Tensor:
    """Bits of float16 values, for comparisons that distinguish 0 from -0."""
    assert tensor.dtype is torch.float16
    return tensor.view(torch.int16)


def flip_bit(parts: dict[str, Tensor], name: str, index: tuple[int, ...], bit: int) -> None:
    """Replaces tensor `name` by a copy with one bit of one element flipped."""
    tensor = parts[name].clone()
    dtype = torch.int16 if tensor.element_size() == 2 else torch.int32
    words = tensor.view(dtype)
    words[index] ^= torch.tensor(1 << bit).to(dtype)
    parts[name] = tensor
