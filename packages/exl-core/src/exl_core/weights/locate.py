"""Where a checkpoint holds a tensor of the model: under which name, whole or in pieces.

Owns what differs between files of one architecture in names: other roots, tensors of several
projections stored as one (`qkv_proj`, `gate_up_proj`), matrices in pieces. Reads headers only.
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
    """`stored` says what the model sees of it.

    `matrix` is None for a tensor that is stored whole, under `stored.name`: its rows begin at
    `first_row` of that. A matrix has its own first column.
    """

    stored: StoredTensor
    first_row: int = 0
    matrix: QuantizedMatrix | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A name that a file may use, and which of that tensor's rows are meant."""

    name: str
    first_row: int
    num_rows: int  # of the file's tensor


def locate(source: TensorSource, config: ModelConfig, name: str, shape: tuple[int, ...]) -> Located:
    """Where our tensor `name` is; raises if nowhere, unreadable, or of another shape."""
    for candidate in _candidates(source, config, name, shape):
        if len(shape) == MATRIX:
            stem = candidate.name.removesuffix(".weight")
            matrix = find_quantized(source, stem, shape, candidate.first_row, candidate.num_rows)
            if matrix is not None:
                return _in_pieces(matrix)
        if candidate.name in source.tensors:
            return _whole(source, candidate, shape)
    raise MissingTensorError(
        f"tensor {_names(source, config, name)[0]!r} is missing",
        where=_place(source),
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
    """Projections stored as one come first: files that have them have the others by mistake."""
    fused = None if source.format == "gguf" else fused_with(config, name)
    if fused is not None:
        fused_name, first_row, num_rows = fused
        for other in checkpoint_names(config.arch, fused_name):
            yield _Candidate(other, first_row, num_rows)
    for other in _names(source, config, name):
        yield _Candidate(other, 0, shape[0])


def _in_pieces(matrix: QuantizedMatrix) -> Located:
    first, rows, total = matrix.first_column, matrix.shape[0], matrix.stored_columns
    stored = StoredTensor(
        name=matrix.name,
        shape=matrix.shape,
        storage=matrix.method.upper(),
        size_bytes=share(matrix.stored_bytes, first, first + rows, total),
        file=next(iter(matrix.parts.values())).file,
    )
    return Located(stored, matrix=matrix)


def _whole(source: TensorSource, candidate: _Candidate, shape: tuple[int, ...]) -> Located:
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
    """EXL2 files store the norm of each head's queries and keys once for every head."""
    is_head_norm = found.name.endswith(("q_norm.weight", "k_norm.weight"))
    return is_head_norm and len(found.shape) == MATRIX and found.shape[1:] == shape


def _is_padded_bias(source: TensorSource, found: StoredTensor, shape: tuple[int, ...]) -> bool:
    """EXL2 files pad a bias like the matrix that it belongs to."""
    stem = found.name.removesuffix(".bias")
    padded = -(-shape[0] // COLUMN_STEP) * COLUMN_STEP
    return f"{stem}.q_weight" in source.tensors and found.shape == (padded,)


def share(size_bytes: int, start: int, stop: int, count: int) -> int:
    """Bytes of the items start .. stop - 1 of `count`; all shares add up to the whole."""
    return size_bytes * stop // count - size_bytes * start // count


def _place(source: TensorSource) -> Path | None:
    """The file, or the folder of the files."""
    files = {tensor.file for tensor in source.tensors.values()}
    return files.pop() if len(files) == 1 else files.pop().parent if files else None
