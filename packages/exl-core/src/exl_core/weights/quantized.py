"""Quantized matrices of a checkpoint: which tensors make one up, and opening it.

Joins what a source holds under one name (`P.q_weight`, `P.q_scale`, ...) and hands it to the codec
of the format, which is found by the tensors that are there, never by a file's name. Several
matrices of the model may be columns of one stored matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gguf import GGMLQuantizationType
from torch import Tensor

from exl_core.arch.quantization import Quantization
from exl_core.codecs import exl2, gguf_blocks, gguf_runtime, gptq
from exl_core.codecs.exl2_runtime import Exl2Matrix, runs_of
from exl_core.codecs.gptq_runtime import GptqMatrix, group_runs
from exl_core.codecs.runtime import BLOCK_ROWS, PANEL_COLUMNS, RuntimeMatrix, packed_bytes
from exl_core.errors import ConfigError, WeightShapeError, WeightValueError
from exl_core.ops.quantized import GroupRun, QuantColumns, QuantLayout
from exl_core.weights.source import StoredTensor, TensorSource

MATRIX = 2  # dimensions
_PARTS = (("exl2", "q_weight", exl2.PARTS), ("gptq", "qweight", gptq.PARTS))


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix [out_features, in_features], stored in `parts`.

    It is the columns from `first_column` of a stored matrix of `stored_columns` in all, which
    writers may have padded.
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
        """Of the whole stored matrix."""
        return sum(part.size_bytes for part in self.parts.values())


def find_quantized(
    source: TensorSource, stem: str, shape: tuple[int, ...], first_column: int, stored_columns: int
) -> QuantizedMatrix | None:
    """The matrix that is stored in pieces under `stem`, or None."""
    for method, marker, names in _PARTS:
        if f"{stem}.{marker}" not in source.tensors:
            continue
        found = {part: source.tensors.get(f"{stem}.{part}") for part in names}
        parts = {part: tensor for part, tensor in found.items() if tensor is not None}
        return QuantizedMatrix(stem, shape, first_column, stored_columns, method, parts)
    return None


def open_matrix(
    source: TensorSource, matrix: QuantizedMatrix, quantization: Quantization | None
) -> RuntimeMatrix:
    """The matrix, checked by its codec as far as that goes without unpacking it."""
    parts = {part: source.read_raw(tensor.name) for part, tensor in matrix.parts.items()}
    out_features, in_features = matrix.shape
    if matrix.method == "exl2":
        padded = -(-matrix.stored_columns // exl2.COLUMN_STEP) * exl2.COLUMN_STEP
        exl2_layer = exl2.check(parts, matrix.where)
        _check_shape(exl2_layer, in_features, padded, matrix.where)
        return Exl2Matrix(exl2_layer, out_features, first_column=matrix.first_column)
    settings = gptq_settings(matrix, quantization)
    gptq_layer = gptq.check(parts, settings, matrix.where)
    _check_shape(gptq_layer, in_features, matrix.stored_columns, matrix.where)
    return GptqMatrix(gptq_layer, out_features, first_column=matrix.first_column)


def gptq_settings(matrix: QuantizedMatrix, quantization: Quantization | None) -> gptq.GptqSettings:
    if quantization is None or quantization.method != "gptq":
        raise ConfigError(
            "the weights are GPTQ's, but no configuration says how they are packed",
            where=matrix.parts["qweight"].file.parent,
            expected="'quantization_config' in config.json, or quantize_config.json",
        )
    return gptq.parse_settings(quantization.settings, quantization.where)


def runtime_bytes(matrix: QuantizedMatrix, quantization: Quantization | None) -> int:
    """What the matrix will take in memory, told from headers alone."""
    sizes = {part: tensor.size_bytes for part, tensor in matrix.parts.items()}
    if matrix.method == "exl2":  # scale codes of 4 bits become float16
        stored = sizes["q_weight"] + 4 * sizes.get("q_scale", 0)
    else:
        rows = gptq_settings(matrix, quantization).group_size
        rounded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS if rows > 0 else rows
        scales = matrix.parts.get("scales")
        stored = sizes["qweight"] * rounded // rows + (3 * scales.num_values if scales else 0)
    columns = -(-matrix.shape[0] // PANEL_COLUMNS) * PANEL_COLUMNS
    return stored * columns // matrix.stored_columns


def stored_groups(
    source: TensorSource, matrix: QuantizedMatrix, quantization: Quantization | None
) -> tuple[GroupRun, ...]:
    """Widths and sizes of the matrix's groups; reads no more than its group table."""
    if matrix.method == "exl2":
        table = matrix.parts.get("q_groups")
        if table is None:
            return ()  # which opening the matrix complains about
        packed_rows = matrix.parts["q_weight"].shape[0]
        return runs_of(exl2.read_groups(source.read_raw(table.name), packed_rows, matrix.where))
    settings, rows = gptq_settings(matrix, quantization), matrix.shape[1]
    size = rows if settings.group_size == gptq.ONE_GROUP else settings.group_size
    return group_runs(settings.bits, rows, size)


def block_groups(tensor: StoredTensor) -> tuple[GroupRun, ...]:
    """The same of a tensor of a GGUF file."""
    kind = GGMLQuantizationType.__members__.get(tensor.storage)
    group = gguf_blocks.GROUPS.get(kind) if kind is not None else None
    if group is None or len(tensor.shape) != MATRIX:
        return ()
    return (GroupRun(group.bits, tensor.shape[1] // group.rows, group.rows),)


def _check_shape(
    layer: exl2.Exl2Linear | gptq.GptqLinear, in_features: int, out_features: int, where: str
) -> None:
    if (layer.in_features, layer.out_features) != (in_features, out_features):
        raise WeightShapeError(
            "the quantized matrix has the wrong shape",
            where=where,
            expected=[in_features, out_features],
            got=[layer.in_features, layer.out_features],
            next_step="The weights and the configuration are not of one model.",
        )


def block_layout(tensor: StoredTensor) -> QuantLayout | None:
    """The run-time layout of a tensor of a GGUF file; None where it has none."""
    if tensor.storage not in GGMLQuantizationType.__members__ or len(tensor.shape) != MATRIX:
        return None
    out_features, in_features = tensor.shape
    kind = GGMLQuantizationType[tensor.storage]
    return gguf_runtime.layout_of(kind, out_features, in_features)


def block_bytes(tensor: StoredTensor) -> int | None:
    """What a GGUF tensor will take in memory in blocks; None where it is not kept in them."""
    layout = block_layout(tensor)
    return None if layout is None else packed_bytes(layout)


class BlockMatrix:
    """A tensor of a GGUF file in blocks; `order` are the rows of the file to take, in order."""

    def __init__(self, source: TensorSource, tensor: StoredTensor, order: Tensor | None) -> None:
        self._source = source
        self._tensor = tensor
        self._order = order

    @cached_property
    def layout(self) -> QuantLayout:
        layout = block_layout(self._tensor)
        assert layout is not None, "see block_layout"
        return layout

    @property
    def _kind(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self._tensor.storage]

    def columns(self, first: int, last: int) -> QuantColumns:
        raw = self._rows(first, last)
        bad = gguf_runtime.bad_blocks(raw, self._kind)
        if bad:
            raise WeightValueError(
                f"tensor {self._tensor.name!r} has {bad} blocks with a scale that is NaN or"
                " infinite",
                where=self._tensor.file,
                next_step="The file is damaged or its conversion failed; get the model from"
                " another source.",
            )
        return gguf_runtime.columns_of(raw, self._kind)

    def dense(self, first: int, last: int) -> Tensor:
        values = gguf_blocks.decode(self._rows(first, last), self._kind)
        assert values is not None, "see check_readable"
        return values

    def _rows(self, first: int, last: int) -> Tensor:
        raw = self._source.read_raw(self._tensor.name)
        return raw[first:last] if self._order is None else raw[self._order[first:last]]
