"""Quantized matrices of a checkpoint: finds the tensors that store their codes, and opens them.

Such a matrix is stored as several tensors under one stem (`P.q_weight`, `P.q_scale`, ...), which
are passed to the codec of the format. The format is recognized by the tensors that are present,
never by a file's name; GPTQ and AWQ share their names, and the configuration tells them apart.
Several matrices of the model may be column ranges of one stored matrix.

A matrix in GGUF blocks is one tensor, whose storage type names the block format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from exl_core.arch.quantization import Quantization
from exl_core.errors import (
    ConfigError,
    UnsupportedModelError,
    WeightShapeError,
    WeightValueError,
)
from exl_core.formats.codecs.awq import layout as awq
from exl_core.formats.codecs.awq import matrix as awq_matrix
from exl_core.formats.codecs.compressed import layout as compressed
from exl_core.formats.codecs.compressed.matrix import CompressedMatrix
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2 import matrix as exl2_matrix
from exl_core.formats.codecs.exl2.matrix import Exl2Matrix, runs_of
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.exl3 import matrix as exl3_matrix
from exl_core.formats.codecs.fp8 import layout as fp8
from exl_core.formats.codecs.fp8.matrix import BITS as FP8_BITS
from exl_core.formats.codecs.fp8.matrix import Fp8Matrix
from exl_core.formats.codecs.ggml import layout as ggml
from exl_core.formats.codecs.ggml import matrix as ggml_matrix
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.formats.codecs.gptq import matrix as gptq_matrix
from exl_core.formats.codecs.gptq.matrix import GptqMatrix, group_runs
from exl_core.formats.codecs.mxfp4 import layout as mxfp4
from exl_core.formats.codecs.mxfp4 import matrix as mxfp4_matrix
from exl_core.formats.codecs.runtime import Move, RuntimeMatrix, stay
from exl_core.formats.containers.source import StoredTensor, TensorSource
from exl_core.ops.weights import (
    TILE,
    Formula,
    GroupedColumns,
    GroupedLayout,
    GroupRun,
    TrellisLayout,
    WeightColumns,
    WeightLayout,
)

MATRIX = 2  # number of dimensions
COMPRESSED = "compressed-tensors"


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
    def form(self) -> tuple[object, ...]:
        """Everything that headers say about the matrix, but for its name and its place in files."""
        parts = [(part, tensor.storage, tensor.shape) for part, tensor in self.parts.items()]
        return self.method, self.shape, self.first_column, self.stored_columns, *parts

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole stored matrix."""
        return sum(part.size_bytes for part in self.parts.values())


class _Stored(NamedTuple):
    """A matrix in its file: what the functions of a format read."""

    source: TensorSource
    matrix: QuantizedMatrix
    quantization: Quantization | None

    def section(self, *methods: str) -> Quantization:
        """The configuration of the matrix, which is of one of these methods."""
        quantization = self.quantization
        if quantization is None or quantization.method not in methods:
            raise ConfigError(
                f"the weights are stored as {self.matrix.method.upper()}, but the configuration"
                " does not say how they are packed",
                where=next(iter(self.matrix.parts.values())).file.parent,
                expected="'quantization_config' in config.json, or quantize_config.json",
                got="none" if quantization is None else f"one of {quantization.method!r}",
            )
        return quantization

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors."""
        parts = self.matrix.parts
        return {part: self.source.read_raw(tensor.name) for part, tensor in parts.items()}

    def check_shape(self, layer: _Sized, columns: int | None = None) -> None:
        """Raises unless the codec found the model's shape. `columns` includes padding."""
        matrix = self.matrix
        expected = (matrix.shape[1], columns or matrix.stored_columns)
        if (layer.in_features, layer.out_features) != expected:
            raise WeightShapeError(
                "the quantized matrix has the wrong shape",
                where=matrix.where,
                expected=list(expected),
                got=[layer.in_features, layer.out_features],
                next_step="The weights and the configuration are not of one model.",
            )

    def layout(
        self,
        runs: tuple[GroupRun, ...],
        formula: Formula,
        scale_dtype: torch.dtype = torch.float16,
    ) -> GroupedLayout:
        n, k = self.matrix.shape
        return GroupedLayout(n, k, runs, None, scale_dtype, formula)


class _Sized(Protocol):
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


class _Format(NamedTuple):
    """A format of matrices, each stored as several tensors.

    parts      names of the tensors after the stem; the first shows that a matrix is stored so
    layout     run-time layout, from headers and group tables only, without a permutation of rows
    open       the matrix, with all checks of its codec that do not need the unpacked codes. The
               tensor, if given, is the stored column of each of the matrix's columns
    open_alike  the same for matrices of equal `form`, with joint checks. None if one of them needs
               a check by itself
    is_marked  whether the first part, and the configuration, show this format rather than another
    joint      what the name of a part has between the stem and its own name
    """

    parts: tuple[str, ...]
    layout: Callable[[_Stored], WeightLayout]
    open: Callable[[_Stored, Tensor | None], RuntimeMatrix]
    is_marked: Callable[[StoredTensor, Quantization | None], bool] = lambda *_: True
    joint: str = "."
    open_alike: Callable[[Sequence[_Stored]], Sequence[RuntimeMatrix] | None] = lambda _: None


def _exl2_layout(stored: _Stored) -> GroupedLayout:
    parts, where = stored.matrix.parts, stored.matrix.where
    table = parts.get("q_groups")
    if table is None:
        return stored.layout((), "middle")  # `_open_exl2` reports the missing tensor
    packed = parts["q_weight"].shape
    if len(packed) != MATRIX:
        raise WeightShapeError(
            "tensor 'q_weight' has an impossible shape",
            where=where,
            expected=f"{MATRIX} dimensions",
            got=packed,
        )
    groups = exl2.read_groups(stored.source.read_raw(table.name), packed[0], where)
    return stored.layout(runs_of(groups), "middle")


def _open_exl2(stored: _Stored, stored_columns: Tensor | None) -> RuntimeMatrix:
    matrix = stored.matrix
    layer = exl2.check(stored.parts(), matrix.where)
    stored.check_shape(layer, -(-matrix.stored_columns // exl2.COLUMN_STEP) * exl2.COLUMN_STEP)
    return Exl2Matrix(
        layer, matrix.shape[0], first_column=matrix.first_column, stored_columns=stored_columns
    )


def _open_exl2_alike(all_stored: Sequence[_Stored]) -> Sequence[RuntimeMatrix] | None:
    matrix = all_stored[0].matrix
    layers = exl2.check_alike([stored.parts() for stored in all_stored], matrix.where)
    if layers is None:
        return None
    columns = -(-matrix.stored_columns // exl2.COLUMN_STEP) * exl2.COLUMN_STEP
    all_stored[0].check_shape(layers[0], columns)
    return exl2_matrix.matrices_of(layers, matrix.shape[0], matrix.first_column)


def _exl3_layout(stored: _Stored) -> TrellisLayout:
    matrix = stored.matrix
    n, k = matrix.shape
    shape, codebook = matrix.parts["trellis"].shape, exl3.codebook_of(matrix.parts)
    if len(shape) == MATRIX:
        raise UnsupportedModelError(
            "quantized token embeddings of EXL3 cannot be read",
            where=matrix.where,
            next_step="Use a model whose embeddings are not quantized, which is the default of its"
            " converter.",
        )
    exl3.check_trellis_shape(shape, codebook, matrix.where)
    columns = exl3_matrix.stored_size(matrix.stored_columns)
    expected = [exl3_matrix.stored_size(k), columns]
    got = [shape[0] * TILE, shape[1] * TILE]
    if got != expected:
        raise WeightShapeError(
            "the quantized matrix has the wrong shape",
            where=matrix.where,
            expected=expected,
            got=got,
            next_step="The weights and the configuration are not of one model.",
        )
    return exl3_matrix.layout_of(n, k, shape[2], codebook, matrix.first_column)


def _open_exl3(stored: _Stored, stored_columns: Tensor | None) -> RuntimeMatrix:
    matrix = stored.matrix
    n, k = _exl3_layout(stored).out_features, matrix.shape[1]  # checks the shape before reading
    layer = exl3.check(stored.parts(), matrix.where)
    return exl3_matrix.Exl3Matrix(
        layer, n, k, first_column=matrix.first_column, stored_columns=stored_columns
    )


def _open_exl3_alike(all_stored: Sequence[_Stored]) -> Sequence[RuntimeMatrix] | None:
    matrix = all_stored[0].matrix
    (n, k), first = matrix.shape, matrix.first_column
    _exl3_layout(all_stored[0])  # checks the shape before reading
    layers = exl3.check_alike([stored.parts() for stored in all_stored], matrix.where)
    if layers is None:
        return None
    return [exl3_matrix.Exl3Matrix(layer, n, k, first_column=first) for layer in layers]


def _gptq_layout(stored: _Stored) -> GroupedLayout:
    section, rows = stored.section("gptq"), stored.matrix.shape[1]
    settings = gptq.parse_settings(section.settings, section.where)
    # Explicit zero points take more memory, and may all turn out to be the middle.
    return stored.layout(group_runs(settings.bits, rows, settings.group_rows(rows)), "zeros")


def _open_gptq(stored: _Stored, stored_columns: Tensor | None) -> RuntimeMatrix:
    section, matrix = stored.section("gptq"), stored.matrix
    settings = gptq.parse_settings(section.settings, section.where)
    layer = gptq.check(stored.parts(), settings, matrix.where)
    stored.check_shape(layer)
    return GptqMatrix(
        layer, matrix.shape[0], first_column=matrix.first_column, stored_columns=stored_columns
    )


def _open_gptq_alike(all_stored: Sequence[_Stored]) -> Sequence[RuntimeMatrix] | None:
    section, matrix = all_stored[0].section("gptq"), all_stored[0].matrix
    settings = gptq.parse_settings(section.settings, section.where)
    parts = [stored.parts() for stored in all_stored]
    layers = gptq.check_alike(parts, settings, matrix.where)
    if layers is None:
        return None
    all_stored[0].check_shape(layers[0])
    return gptq_matrix.matrices_of(layers, matrix.shape[0], matrix.first_column)


def _awq_layout(stored: _Stored) -> GroupedLayout:
    section, rows = stored.section("awq"), stored.matrix.shape[1]
    settings = awq.parse_settings(section.settings, section.where)
    return stored.layout(awq_matrix.group_runs(rows, settings.group_rows(rows)), "zeros")


def _open_awq(stored: _Stored, stored_columns: Tensor | None) -> RuntimeMatrix:
    section, matrix = stored.section("awq"), stored.matrix
    settings = awq.parse_settings(section.settings, section.where)
    layer = awq.check(stored.parts(), settings, matrix.where)
    stored.check_shape(layer)
    return awq_matrix.AwqMatrix(
        layer, matrix.shape[0], first_column=matrix.first_column, stored_columns=stored_columns
    )


def _compressed_layout(stored: _Stored) -> GroupedLayout:
    section, matrix = stored.section(COMPRESSED), stored.matrix
    formula: Formula = "zeros" if "weight_zero_point" in matrix.parts else "middle"
    packed, scale = matrix.parts["weight_packed"].shape, matrix.parts.get("weight_scale")
    if scale is None or len(packed) != MATRIX:
        return stored.layout((), formula)  # `_open_compressed` reports the fault
    settings = compressed.parse_settings(section.settings, section.where)
    groups = scale.shape[1] if len(scale.shape) == MATRIX else 1
    in_features = matrix.shape[1]
    bits, rows = compressed.scheme_of(settings, in_features, packed[1], groups, matrix.where)
    return stored.layout(group_runs(bits, in_features, rows), formula)


def _open_compressed(stored: _Stored, stored_columns: Tensor | None) -> RuntimeMatrix:
    section, matrix = stored.section(COMPRESSED), stored.matrix
    settings = compressed.parse_settings(section.settings, section.where)
    layer = compressed.check(stored.parts(), settings, matrix.shape[1], matrix.where)
    stored.check_shape(layer)
    return CompressedMatrix(
        layer, matrix.shape[0], first_column=matrix.first_column, stored_columns=stored_columns
    )


def _fp8_layout(stored: _Stored) -> GroupedLayout:
    scales = [part for name, part in stored.matrix.parts.items() if name != "weight"]
    is_float = any(part.storage == "F32" for part in scales)
    rows = stored.matrix.shape[1]
    in_group = fp8.group_rows(rows, scales[0].shape if scales else (), _fp8_block(stored))
    runs = group_runs(FP8_BITS, rows, in_group)
    return stored.layout(runs, "e4m3", torch.float32 if is_float else torch.float16)


def _open_fp8(stored: _Stored, stored_columns: Tensor | None) -> RuntimeMatrix:
    block, matrix = _fp8_block(stored), stored.matrix
    layer = fp8.check(stored.parts(), block, matrix.where)
    stored.check_shape(layer)
    first = matrix.first_column
    return Fp8Matrix(
        layer,
        matrix.shape[0],
        first_column=first,
        stored_columns=stored_columns,
        where=matrix.where,
    )


def _mxfp4_layout(stored: _Stored) -> GroupedLayout:
    return stored.layout(mxfp4_matrix.group_runs(stored.matrix.shape[1]), "mxfp4", torch.uint8)


def _open_mxfp4(stored: _Stored, stored_columns: Tensor | None) -> RuntimeMatrix:
    matrix = stored.matrix
    layer = mxfp4.check(stored.parts(), matrix.where)
    stored.check_shape(layer)
    return mxfp4_matrix.Mxfp4Matrix(
        layer,
        matrix.shape[0],
        first_column=matrix.first_column,
        stored_columns=stored_columns,
        where=matrix.where,
    )


def _fp8_block(stored: _Stored) -> fp8.Block | None:
    section = stored.section("fp8", COMPRESSED)
    if section.method == COMPRESSED:
        return compressed.parse_settings(section.settings, section.where).block()
    return fp8.parse_block(section.settings, section.where)


def _is_awq(_: StoredTensor, quantization: Quantization | None) -> bool:
    return quantization is not None and quantization.method == "awq"


def _is_fp8(marker: StoredTensor, _: Quantization | None) -> bool:
    return marker.storage == fp8.STORAGE


_FORMATS: dict[str, _Format] = {
    "exl2": _Format(exl2.PARTS, _exl2_layout, _open_exl2, open_alike=_open_exl2_alike),
    "exl3": _Format(exl3.PARTS, _exl3_layout, _open_exl3, open_alike=_open_exl3_alike),
    "awq": _Format(awq.PARTS, _awq_layout, _open_awq, _is_awq),
    "gptq": _Format(gptq.PARTS, _gptq_layout, _open_gptq, open_alike=_open_gptq_alike),
    COMPRESSED: _Format(compressed.PARTS, _compressed_layout, _open_compressed),
    "fp8": _Format(fp8.PARTS, _fp8_layout, _open_fp8, _is_fp8),
    "mxfp4": _Format(mxfp4.PARTS, _mxfp4_layout, _open_mxfp4, joint="_"),
}


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
    for method, known in _FORMATS.items():
        marker = source.tensors.get(f"{stem}{known.joint}{known.parts[0]}")
        if marker is None or not known.is_marked(marker, quantization):
            continue
        found = {part: source.tensors.get(f"{stem}{known.joint}{part}") for part in known.parts}
        parts = {part: tensor for part, tensor in found.items() if tensor is not None}
        return QuantizedMatrix(stem, shape, first_column, stored_columns, method, parts)
    return None


def open_matrix(
    source: TensorSource,
    matrix: QuantizedMatrix,
    quantization: Quantization | None,
    stored_columns: Tensor | None = None,
) -> RuntimeMatrix:
    """The matrix, with all checks of its codec that do not need the unpacked codes.

    `stored_columns`, if given, is the stored column of each of the matrix's columns.
    """
    return _FORMATS[matrix.method].open(_Stored(source, matrix, quantization), stored_columns)


def open_matrices(
    source: TensorSource, matrices: Sequence[QuantizedMatrix], quantization: Quantization | None
) -> list[RuntimeMatrix]:
    """`open_matrix` of several matrices, all columns in order.

    Matrices of equal form are checked jointly. If that leaves a doubt, each is opened by itself,
    which raises the error of the first one that is at fault.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault(matrix.form, []).append(index)
    found: dict[int, RuntimeMatrix] = {}
    for members in alike.values():
        stored = [_Stored(source, matrices[index], quantization) for index in members]
        known = _FORMATS[stored[0].matrix.method]
        opened = known.open_alike(stored) if len(stored) > 1 else None
        found |= zip(members, opened or [known.open(one, None) for one in stored], strict=True)
    return [found[index] for index in range(len(matrices))]


def whole_columns(matrices: Sequence[RuntimeMatrix], move: Move = stay) -> list[WeightColumns]:
    """`columns` of all columns of each matrix. The caller moves the tensors of the results, some of
    which are moved already because they were computed on the device."""
    exl2_matrices = [one for one in matrices if isinstance(one, Exl2Matrix)]
    if len(exl2_matrices) == len(matrices):
        return list(exl2_matrix.whole_columns(exl2_matrices, move))
    return [
        one.columns(0, one.layout.out_features, stay if _is_moved_later(one) else move)
        for one in matrices
    ]


def _is_moved_later(matrix: RuntimeMatrix) -> bool:
    """Whether the columns consist of stored tensors, without computations on the device."""
    return isinstance(matrix, exl3_matrix.Exl3Matrix | GptqMatrix)


def stored_layout(
    source: TensorSource, matrix: QuantizedMatrix, quantization: Quantization | None
) -> WeightLayout:
    """Run-time layout of the matrix, from headers and group tables only.

    The opened matrix may have a permutation of its rows besides, or need no zero points.
    """
    return _FORMATS[matrix.method].layout(_Stored(source, matrix, quantization))


def block_groups(tensor: StoredTensor) -> tuple[GroupRun, ...]:
    """Bit widths and sizes of the groups of a tensor in a GGUF file; () if it has none."""
    kind = GGMLQuantizationType.__members__.get(tensor.storage)
    group = ggml.GROUPS.get(kind) if kind is not None else None
    if group is None or len(tensor.shape) != MATRIX:
        return ()
    return (GroupRun(group.bits, tensor.shape[1] // group.rows, group.rows),)


def block_layout(tensor: StoredTensor) -> GroupedLayout | None:
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
    def layout(self) -> GroupedLayout:
        layout = block_layout(self._tensor)
        assert layout is not None, "block_layout accepted this tensor"
        return layout

    @property
    def _kind(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self._tensor.storage]

    def columns(self, first: int, last: int, move: Move = stay) -> GroupedColumns:
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
