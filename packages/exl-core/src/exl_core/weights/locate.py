"""Locates a tensor of the model in a checkpoint: its stored name, and whether it is quantized.

Owns the differences in names between files of one architecture: other prefixes, projections fused
into one tensor (`qkv_proj`, `gate_up_proj`), quantized matrices stored as several tensors. Reads
headers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from exl_core.arch.key_map import checkpoint_names, fused_with, gguf_name
from exl_core.arch.spec import ModelConfig
from exl_core.codecs.exl2 import COLUMN_STEP
from exl_core.errors import MissingTensorError, WeightShapeError
from exl_core.weights.quantized import MATRIX, QuantizedMatrix, find_quantized
from exl_core.weights.source import StoredTensor, TensorSource


@dataclass(frozen=True, slots=True)
class Located:
    """Location of one tensor. `stored` describes the part that belongs to the model's tensor.

    `matrix` is None if the tensor is stored as such, under `stored.name`; its rows then start at
    `first_row` there. If `matrix` is set, `matrix.first_column` takes the place of `first_row`.
    """

    stored: StoredTensor
    first_row: int = 0
    matrix: QuantizedMatrix | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible stored name, and the range of that tensor's rows."""

    name: str
    first_row: int
    num_rows: int  # rows of the stored tensor


def locate(source: TensorSource, config: ModelConfig, name: str, shape: tuple[int, ...]) -> Located:
    """Location of tensor `name` (canonical). Raises if it is missing, unreadable or of a wrong
    shape."""
    for candidate in _candidates(source, config, name, shape):
        if len(shape) == MATRIX:
            stem = candidate.name.removesuffix(".weight")
            matrix = find_quantized(source, stem, shape, candidate.first_row, candidate.num_rows)
            if matrix is not None:
                return _located_matrix(matrix)
        if candidate.name in source.tensors:
            return _located_tensor(source, candidate, shape)
    raise MissingTensorError(
        f"tensor {_names(source, config, name)[0]!r} is missing",
        where=_path_of(source),
        expected=f"{list(shape)}, which a {config.arch.name} model of this configuration has",
        got=f"{len(source.tensors)} other tensors",
        next_step="'exl inspect model PATH --tensors' shows what there is.",
    )


def _names(source: TensorSource, config: ModelConfig, name: str) -> list[str]:
    if source.format == "gguf":
        return [gguf_name(config.arch, name)]
    return checkpoint_names(config.arch, name)


def _candidates(
    source: TensorSource, config: ModelConfig, name: str, shape: tuple[int, ...]
) -> Iterator[_Candidate]:
    """Possible stored names. Fused projections come first: in a file that has them, separate
    projections are a leftover."""
    fused = None if source.format == "gguf" else fused_with(config, name)
    if fused is not None:
        fused_name, first_row, num_rows = fused
        for other in checkpoint_names(config.arch, fused_name):
            yield _Candidate(other, first_row, num_rows)
    for other in _names(source, config, name):
        yield _Candidate(other, 0, shape[0])


def _located_matrix(matrix: QuantizedMatrix) -> Located:
    first, rows, total = matrix.first_column, matrix.shape[0], matrix.stored_columns
    stored = StoredTensor(
        name=matrix.name,
        shape=matrix.shape,
        storage=matrix.method.upper(),
        size_bytes=share(matrix.stored_bytes, first, first + rows, total),
        file=next(iter(matrix.parts.values())).file,
    )
    return Located(stored, matrix=matrix)


def _located_tensor(source: TensorSource, candidate: _Candidate, shape: tuple[int, ...]) -> Located:
    found = source.tensors[candidate.name]
    source.check_readable(found.name)
    whole = (candidate.num_rows, *shape[1:])
    if _is_repeated_head_norm(found, shape):
        return Located(found)
    if found.shape != whole and not _is_padded_bias(source, found, whole):
        raise WeightShapeError(
            f"tensor {found.name!r} has the wrong shape",
            where=found.file,
            expected=list(whole),
            got=list(found.shape),
            next_step="The weights and the configuration are not of one model.",
        )
    first = candidate.first_row
    size = share(found.size_bytes, first, first + shape[0], candidate.num_rows)
    return Located(replace(found, shape=shape, size_bytes=size), first)


def _is_repeated_head_norm(found: StoredTensor, shape: tuple[int, ...]) -> bool:
    """Whether this is a head norm of an EXL2 file, which repeats the norm for every head."""
    is_head_norm = found.name.endswith(("q_norm.weight", "k_norm.weight"))
    return is_head_norm and len(found.shape) == MATRIX and found.shape[1:] == shape


def _is_padded_bias(source: TensorSource, found: StoredTensor, shape: tuple[int, ...]) -> bool:
    """Whether this is a bias of an EXL2 file, padded like its matrix."""
    stem = found.name.removesuffix(".bias")
    padded = -(-shape[0] // COLUMN_STEP) * COLUMN_STEP
    return f"{stem}.q_weight" in source.tensors and found.shape == (padded,)


def share(size_bytes: int, start: int, stop: int, count: int) -> int:
    """Proportional bytes of the items start .. stop - 1 of `count`. The shares of disjoint ranges
    that cover all items add up to `size_bytes`."""
    return size_bytes * stop // count - size_bytes * start // count


def _path_of(source: TensorSource) -> Path | None:
    """The source's file, or the folder of its files."""
    files = {tensor.file for tensor in source.tensors.values()}
    return files.pop() if len(files) == 1 else files.pop().parent if files else None
