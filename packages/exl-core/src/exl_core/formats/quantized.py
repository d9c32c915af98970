"""Quantized matrices of a checkpoint: finds the tensors that store their codes, and opens them.

Such a matrix is stored as several tensors under one stem (`P.q_weight`, `P.q_scale`, ...), which
are passed to the codec of the format. The format is recognized by the tensors that are present,
never by a file's name; GPTQ and AWQ share their names, and the configuration tells them apart.
Several matrices of the model may be column ranges of one stored matrix.

A matrix in GGUF blocks is one tensor, whose storage type names the block format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from exl_core.arch.quantization import Quantization
from exl_core.errors import ConfigError, WeightShapeError, WeightValueError
from exl_core.formats.codecs.awq import layout as awq
from exl_core.formats.codecs.awq import matrix as awq_matrix
from exl_core.formats.codecs.compressed import layout as compressed
from exl_core.formats.codecs.compressed.matrix import CompressedMatrix
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2.matrix import Exl2Matrix, runs_of
from exl_core.formats.codecs.fp8 import layout as fp8
from exl_core.formats.codecs.fp8.matrix import BITS as FP8_BITS
from exl_core.formats.codecs.fp8.matrix import Fp8Matrix
from exl_core.formats.codecs.ggml import layout as ggml
from exl_core.formats.codecs.ggml import matrix as ggml_matrix
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.formats.codecs.gptq.matrix import GptqMatrix, group_runs
from exl_core.formats.codecs.runtime import Move, RuntimeMatrix, stay
from exl_core.formats.containers.source import StoredTensor, TensorSource
from exl_core.ops.quantized import GroupRun, QuantColumns, QuantLayout

MATRIX = 2  # number of dimensions
COMPRESSED = "compressed-tensors"
_PARTS: dict[str, tuple[str, ...]] = {  # the first one shows that a matrix is stored so
    "exl2": exl2.PARTS,
    "awq": awq.PARTS,
    "gptq": gptq.PARTS,
    COMPRESSED: compressed.PARTS,
    "fp8": fp8.PARTS,
}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix [out_features, in_features], stored as the tensors `parts`.

    It consists of the columns from `first_column` on of a stored matrix with `stored_columns`
    columns, which the writer may have padded.
    """

    name: str
    shape: tuple[int, ...]
    first_column: int
    stored_columns: int
    method: str
    parts: Mapping[str, StoredTensor]

    @property
    def where(self) -> str:
        return f"{next(iter(self.parts.values())).file}: {self.name}"

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole stored matrix."""
        return sum(part.size_bytes for part in self.parts.values())


def find_quantized(
    source: TensorSource,
    quantization: Quantization | None,
    stem: str,
    shape: tuple[int, ...],
    columns: tuple[int, int],
) -> QuantizedMatrix | None:
    """The quantized matrix stored under `stem`, or None. `columns` are its first column in the
    stored matrix, and the number of stored columns without padding."""
    first_column, stored_columns = columns
    is_awq = quantization is not None and quantization.method == "awq"
    for method, names in _PARTS.items():
        marker = source.tensors.get(f"{stem}.{names[0]}")
        if marker is None or (method == "awq" and not is_awq):
            continue
        if method == "fp8" and marker.storage != fp8.STORAGE:
            continue
        found = {part: source.tensors.get(f"{stem}.{part}") for part in names}
        parts = {part: tensor for part, tensor in found.items() if tensor is not None}
        return QuantizedMatrix(stem, shape, first_column, stored_columns, method, parts)
    return None


def open_matrix(
    source: TensorSource,
    matrix: QuantizedMatrix,
    quantization: Quantization | None,
    order: Tensor | None = None,
) -> RuntimeMatrix:
    """The matrix, with all checks of its codec that do not need the unpacked codes.

    `order`, if given, is the stored column of each of the matrix's columns.
    """
    first = matrix.first_column
    parts = {part: source.read_raw(tensor.name) for part, tensor in matrix.parts.items()}
    out_features, in_features = matrix.shape
    if matrix.method == "exl2":
        padded = -(-matrix.stored_columns // exl2.COLUMN_STEP) * exl2.COLUMN_STEP
        exl2_layer = exl2.check(parts, matrix.where)
        _check_shape(exl2_layer, in_features, padded, matrix.where)
        return Exl2Matrix(exl2_layer, out_features, first_column=first, order=order)
    section = _section(matrix, quantization)
    if matrix.method == "fp8":
        floats = fp8.check(parts, _fp8_block(section), matrix.where)
        _check_shape(floats, in_features, matrix.stored_columns, matrix.where)
        return Fp8Matrix(floats, out_features, first_column=first, order=order, where=matrix.where)
    if matrix.method == COMPRESSED:
        settings = compressed.parse_settings(section.settings, section.where)
        packed = compressed.check(parts, settings, in_features, matrix.where)
        _check_shape(packed, in_features, matrix.stored_columns, matrix.where)
        return CompressedMatrix(packed, out_features, first_column=first, order=order)
    if matrix.method == "awq":
        awq_settings = awq.parse_settings(section.settings, section.where)
        awq_layer = awq.check(parts, awq_settings, matrix.where)
        _check_shape(awq_layer, in_features, matrix.stored_columns, matrix.where)
        return awq_matrix.AwqMatrix(awq_layer, out_features, first_column=first, order=order)
    gptq_settings = gptq.parse_settings(section.settings, section.where)
    gptq_layer = gptq.check(parts, gptq_settings, matrix.where)
    _check_shape(gptq_layer, in_features, matrix.stored_columns, matrix.where)
    return GptqMatrix(gptq_layer, out_features, first_column=first, order=order)


def _section(matrix: QuantizedMatrix, quantization: Quantization | None) -> Quantization:
    """The configuration of the matrix's method."""
    methods = (matrix.method, COMPRESSED) if matrix.method == "fp8" else (matrix.method,)
    if quantization is None or quantization.method not in methods:
        raise ConfigError(
            f"the weights are stored as {matrix.method.upper()}, but the configuration does not say"
            " how they are packed",
            where=next(iter(matrix.parts.values())).file.parent,
            expected="'quantization_config' in config.json, or quantize_config.json",
            got="none" if quantization is None else f"one of {quantization.method!r}",
        )
    return quantization


def _fp8_block(section: Quantization) -> fp8.Block | None:
    if section.method == COMPRESSED:
        return compressed.parse_settings(section.settings, section.where).block()
    return fp8.parse_block(section.settings, section.where)


def stored_layout(
    source: TensorSource, matrix: QuantizedMatrix, quantization: Quantization | None
) -> QuantLayout:
    """Run-time layout of the matrix, except the permutation of its rows.

    Reads no more than `stored_groups` does. For GPTQ and AWQ it assumes explicit zero points, which
    take more memory, although they may all turn out to be the middle.
    """
    has_zeros = matrix.method in ("gptq", "awq") or "weight_zero_point" in matrix.parts
    is_fp8 = matrix.method == "fp8"
    has_floats = is_fp8 and any(
        part.storage == "F32" and name != "weight" for name, part in matrix.parts.items()
    )
    return QuantLayout(
        out_features=matrix.shape[0],
        in_features=matrix.shape[1],
        runs=stored_groups(source, matrix, quantization),
        features=None,
        scale_dtype=torch.float32 if has_floats else torch.float16,
        offset="zeros" if has_zeros else "middle",
        values="e4m3" if is_fp8 else "integers",
    )


def stored_groups(
    source: TensorSource, matrix: QuantizedMatrix, quantization: Quantization | None
) -> tuple[GroupRun, ...]:
    """Bit widths and sizes of the matrix's groups. Reads no more than the group table."""
    if matrix.method == "exl2":
        table = matrix.parts.get("q_groups")
        if table is None:
            return ()  # `open_matrix` reports the missing tensor
        packed = matrix.parts["q_weight"].shape
        if len(packed) != MATRIX:
            raise WeightShapeError(
                "tensor 'q_weight' has an impossible shape",
                where=matrix.where,
                expected=f"{MATRIX} dimensions",
                got=packed,
            )
        return runs_of(exl2.read_groups(source.read_raw(table.name), packed[0], matrix.where))
    section, rows = _section(matrix, quantization), matrix.shape[1]
    if matrix.method == "fp8":
        scales = [part.shape for name, part in matrix.parts.items() if name != "weight"]
        in_group = fp8.group_rows(rows, scales[0] if scales else (), _fp8_block(section))
        return group_runs(FP8_BITS, rows, in_group)
    if matrix.method == COMPRESSED:
        return _compressed_groups(matrix, section)
    if matrix.method == "awq":
        settings = awq.parse_settings(section.settings, section.where)
        return awq_matrix.group_runs(rows, settings.group_rows(rows))
    gptq_settings = gptq.parse_settings(section.settings, section.where)
    return group_runs(gptq_settings.bits, rows, gptq_settings.group_rows(rows))


def _compressed_groups(matrix: QuantizedMatrix, section: Quantization) -> tuple[GroupRun, ...]:
    packed, scale = matrix.parts["weight_packed"].shape, matrix.parts.get("weight_scale")
    if scale is None or len(packed) != MATRIX:
        return ()  # `open_matrix` reports the fault
    settings = compressed.parse_settings(section.settings, section.where)
    groups = scale.shape[1] if len(scale.shape) == MATRIX else 1
    in_features = matrix.shape[1]
    bits, rows = compressed.scheme_of(settings, in_features, packed[1], groups, matrix.where)
    return group_runs(bits, in_features, rows)


def block_groups(tensor: StoredTensor) -> tuple[GroupRun, ...]:
    """Bit widths and sizes of the groups of a tensor in a GGUF file; () if it has none."""
    kind = GGMLQuantizationType.__members__.get(tensor.storage)
    group = ggml.GROUPS.get(kind) if kind is not None else None
    if group is None or len(tensor.shape) != MATRIX:
        return ()
    return (GroupRun(group.bits, tensor.shape[1] // group.rows, group.rows),)


class _Sized(Protocol):
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


def _check_shape(layer: _Sized, in_features: int, out_features: int, where: str) -> None:
    if (layer.in_features, layer.out_features) != (in_features, out_features):
        raise WeightShapeError(
            "the quantized matrix has the wrong shape",
            where=where,
            expected=[in_features, out_features],
            got=[layer.in_features, layer.out_features],
            next_step="The weights and the configuration are not of one model.",
        )


def block_layout(tensor: StoredTensor) -> QuantLayout | None:
    """Run-time layout of a tensor in a GGUF file; None if it has none."""
    if tensor.storage not in GGMLQuantizationType.__members__ or len(tensor.shape) != MATRIX:
        return None
    out_features, in_features = tensor.shape
    kind = GGMLQuantizationType[tensor.storage]
    return ggml_matrix.layout_of(kind, out_features, in_features)


class BlockMatrix:
    """A quantized matrix of a GGUF file: the rows from `first_row` on of a stored tensor.

    `permutation`, if given, is the stored row of each matrix row.
    """

    def __init__(
        self,
        source: TensorSource,
        tensor: StoredTensor,
        first_row: int,
        permutation: Tensor | None,
    ) -> None:
        self._source = source
        self._tensor = tensor
        self._first_row = first_row
        self._permutation = permutation

    @cached_property
    def layout(self) -> QuantLayout:
        layout = block_layout(self._tensor)
        assert layout is not None, "block_layout accepted this tensor"
        return layout

    @property
    def _kind(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self._tensor.storage]

    def columns(self, first: int, last: int, move: Move = stay) -> QuantColumns:
        raw = move(self._source.read_raw(self._tensor.name)[self._rows(first, last)])
        bad = ggml_matrix.bad_blocks(raw, self._kind)
        if bad:
            raise WeightValueError(
                f"tensor {self._tensor.name!r} has {bad} blocks with a scale that is NaN or"
                " infinite",
                where=self._tensor.file,
                next_step="The file is damaged or its conversion failed; get the model from"
                " another source.",
            )
        return ggml_matrix.columns_of(raw, self._kind)

    def dense(self, first: int, last: int) -> Tensor:
        return self._source.read(self._tensor.name, self._rows(first, last))

    def _rows(self, first: int, last: int) -> slice | Tensor:
        """Stored rows of the matrix rows first .. last - 1."""
        if self._permutation is not None:
            return self._permutation[first:last]
        return slice(self._first_row + first, self._first_row + last)
