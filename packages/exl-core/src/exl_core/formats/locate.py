"""Locates a tensor of the model in a checkpoint: its stored name, and whether it is quantized.

The places to look in come from the module table. Owns what only a file can tell: which of the
places it has, quantized matrices stored as several tensors, padded biases. Reads headers only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from exl_core.arch.modules import Kind, ModuleRow
from exl_core.arch.places import Place
from exl_core.arch.quantization import Quantization
from exl_core.errors import MissingTensorError, WeightShapeError
from exl_core.formats.codecs.exl2.layout import COLUMN_STEP
from exl_core.formats.containers.source import StoredTensor, TensorSource
from exl_core.formats.quantized import MATRIX, QuantizedMatrix, find_quantized
from exl_core.ops.weights import HADAMARD


@dataclass(frozen=True, slots=True)
class Located:
    """Location of one tensor. `stored` describes the part that belongs to the model's tensor.

    `matrix` is None if the tensor is stored as such, under `stored.name`; its rows then start at
    `place.first_row` there. If `matrix` is set, `matrix.first_column` takes the place of that row.
    """

    stored: StoredTensor
    place: Place
    matrix: QuantizedMatrix | None = None


def locate(
    source: TensorSource, row: ModuleRow, family: str, quantization: Quantization | None = None
) -> Located:
    """Location of a tensor. Raises if it is missing, unreadable or of a wrong shape. `family` names
    the architecture in messages."""
    places = row.places(source.format)
    for place in places:
        if len(row.shape) == MATRIX:
            stem = place.name.removesuffix(".weight")
            columns = place.first_row, place.num_rows
            matrix = find_quantized(source, quantization, stem, row.shape, columns)
            if matrix is not None:
                return _located_matrix(matrix, place)
        if place.name in source.tensors:
            return _located_tensor(source, row, place)
    raise MissingTensorError(
        f"tensor {row.own_name(source.format)!r} is missing",
        where=_path_of(source),
        expected=f"{list(row.shape)}, which a {family} model of this configuration has",
        got=f"{len(source.tensors)} other tensors",
        next_step="'exl inspect model PATH --tensors' shows what there is.",
    )


def refuse_surplus(
    source: TensorSource, row: ModuleRow, quantization: Quantization | None = None
) -> None:
    """Raises WeightShapeError if the file has `row`, an expert after the last one of its layer."""
    for place in row.places(source.format):
        stem = place.name.removesuffix(".weight")
        columns = place.first_row, place.num_rows
        if place.name in source.tensors or find_quantized(
            source, quantization, stem, row.shape, columns
        ):
            raise WeightShapeError(
                f"layer {row.layer} has more experts than the configuration says",
                where=_path_of(source),
                expected=f"{row.expert} experts",
                got=f"a tensor of the next one, {stem!r}",
                next_step="The weights and the configuration are not of one model.",
            )


def _located_matrix(matrix: QuantizedMatrix, place: Place) -> Located:
    first, rows, total = matrix.first_column, matrix.shape[0], matrix.stored_columns
    stored = StoredTensor(
        name=matrix.name,
        shape=matrix.shape,
        storage=matrix.method.upper(),
        size_bytes=share(matrix.stored_bytes, first, first + rows, total),
        file=next(iter(matrix.parts.values())).file,
    )
    return Located(stored, place, matrix)


def _located_tensor(source: TensorSource, row: ModuleRow, place: Place) -> Located:
    found = source.tensors[place.name]
    source.check_readable(found.name)
    if place.may_be_transposed and found.shape != place.stored_shape(row.shape):
        place = replace(place, is_transposed=True)
    whole = place.stored_shape(row.shape)
    if place.experts and found.shape == (whole[0] * whole[1], *whole[2:]):
        whole = found.shape  # the matrices of all experts, one below the other
    if row.kind is Kind.HEAD_NORM and found.shape[1:] == row.shape:
        return Located(found, place)  # EXL2 files repeat the norm for every head
    if (
        row.kind in (Kind.NORM, Kind.ROUTER_VECTOR, Kind.VECTOR)
        and found.num_values == row.shape[0]
    ):
        if len(found.shape) > MATRIX:  # Kimi-Linear's decays are [1, 1, heads, 1]
            found = replace(found, shape=row.shape)
        return Located(found, place)  # norms of all heads may be stored by head
    if row.kind is Kind.TAPS and found.shape == (row.shape[0], 1, *row.shape[1:]):
        return Located(replace(found, shape=row.shape), place)  # as torch's convolutions have it
    if row.shape[0] == 1 and found.shape == row.shape[1:]:
        whole = found.shape  # a matrix of one row may be stored as a vector
    if found.shape != whole and not _is_padded_bias(source, found, whole):
        raise WeightShapeError(
            f"tensor {found.name!r} has the wrong shape",
            where=found.file,
            expected=list(whole),
            got=list(found.shape),
            next_step="The weights and the configuration are not of one model.",
        )
    first = place.first_row
    size = share(found.size_bytes, first, first + row.shape[0], place.num_rows)
    return Located(replace(found, shape=row.shape, size_bytes=size), place)


def _is_padded_bias(source: TensorSource, found: StoredTensor, shape: tuple[int, ...]) -> bool:
    """Whether this is a bias of an EXL2 or EXL3 file, padded like its matrix."""
    stem = found.name.removesuffix(".bias")
    steps = {"q_weight": COLUMN_STEP, "trellis": HADAMARD}
    return any(
        f"{stem}.{part}" in source.tensors and found.shape == (-(-shape[0] // step) * step,)
        for part, step in steps.items()
    )


def share(size_bytes: int, start: int, stop: int, count: int) -> int:
    """Proportional bytes of the items start .. stop - 1 of `count`. The shares of disjoint ranges
    that cover all items add up to `size_bytes`."""
    return size_bytes * stop // count - size_bytes * start // count


def _path_of(source: TensorSource) -> Path | None:
    """The source's file, or the folder of its files."""
    files = {tensor.file for tensor in source.tensors.values()}
    return files.pop() if len(files) == 1 else files.pop().parent if files else None
