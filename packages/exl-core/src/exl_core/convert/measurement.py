"""Measurement of a model as a file: valid for any bit rate, and for this model only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from exl_core.arch.modules import ModuleRow, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.convert.plan import LayerMeasurement, parse_layout
from exl_core.convert.target import Target
from exl_core.errors import RequestError
from exl_core.files import read_json_object

SCHEMA_VERSION = 1
LIMIT_BYTES = 1 << 30  # a hundred layers of hundreds of matrices take far less

_TEXTS = ("source_sha256", "calibration_sha256", "calibration")


class MeasurementError(RequestError):
    """A file holds no measurement, a damaged one, or one of another model."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """`source_sha256` identifies the weights, `calibration_sha256` the calibration rows."""

    source_sha256: str
    calibration_sha256: str
    calibration: str
    layers: tuple[LayerMeasurement, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "source_sha256": self.source_sha256,
            "calibration_sha256": self.calibration_sha256,
            "calibration": self.calibration,
            "layers": [layer.to_json() for layer in self.layers],
        }

    @classmethod
    def read(cls, path: Path) -> Self:
        content = read_json_object(path, MeasurementError, LIMIT_BYTES)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise MeasurementError(
                "is no measurement that this version of exl can read",
                where=path,
                expected=f"schema_version {SCHEMA_VERSION}",
                got=content.get("schema_version"),
            )
        try:
            found: Any = content["layers"]
            layers = tuple(LayerMeasurement.from_json(layer) for layer in found)
            source, rows, text = (content[key] for key in _TEXTS)
        except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
            raise MeasurementError(
                "is damaged", where=path, got=f"{type(error).__name__}: {error}"
            ) from error
        return cls(str(source), str(rows), str(text), layers)

    def check(self, config: ModelConfig, source_sha256: str, target: Target, where: Path) -> None:
        """Raises if it belongs to another model or another format, or has impossible values for a
        matrix."""
        if self.source_sha256 != source_sha256:
            raise MeasurementError(
                "was measured on another model",
                where=where,
                expected=f"sha256 {source_sha256[:16]}",
                got=self.source_sha256[:16],
                next_step="Convert without --measurement.",
            )
        sets = matrix_sets(config)
        found = [matrix for layer in self.layers for matrix in layer.matrices]
        if {matrix.name for matrix in found} != set(sets) or len(found) != len(sets):
            raise MeasurementError(
                "is damaged: it is not about each matrix of the model once",
                where=where,
                expected=f"{len(sets)} matrices",
                got=len(found),
            )
        for matrix in found:
            (out_features, in_features), count = sets[matrix.name]
            numel = target.num_weights(in_features, out_features) * count
            layouts = [parse_layout(candidate.layout) for candidate in matrix.candidates]
            unknown = [layout for layout in layouts if not target.has(layout)]
            if unknown:
                raise MeasurementError(
                    "was measured for another format or codebook",
                    where=where,
                    expected=f"layouts of {target}",
                    got=f"{str(unknown[0])!r}",
                    next_step="Convert without --measurement.",
                )
            bad = [
                candidate
                for candidate, layout in zip(matrix.candidates, layouts, strict=True)
                if not 0.0 <= candidate.error < float("inf")
                or candidate.bits < numel  # every code has at least 1 bit
                or not layout.fits(in_features)
            ]
            if matrix.numel != numel or not matrix.candidates or bad:
                raise MeasurementError(f"is damaged at matrix {matrix.name!r}", where=where)


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes [out_features, in_features] of the matrices of all layers that a conversion quantizes,
    by canonical name."""
    return {
        row.name: (row.shape[0], row.shape[1])
        for row in module_table(config).rows
        if row.is_converted and row.layer is not None
    }


class MatrixSet(NamedTuple):
    """Matrices that get one layout together: a single one, or the same one of each expert of a
    layer. `shape` is [out_features, in_features] of each, `size` their number."""

    shape: tuple[int, int]
    size: int


def set_name(row: ModuleRow) -> str:
    """Name of the set of a matrix: the matrix's own, for experts with * in place of the index."""
    if row.expert is None:
        return row.name
    before, _, after = row.name.rpartition(f".{row.expert}.")
    return f"{before}.*.{after}"


def matrix_sets(config: ModelConfig) -> dict[str, MatrixSet]:
    """Sets of matrices of all layers that a conversion quantizes, by name."""
    sets: dict[str, MatrixSet] = {}
    for row in module_table(config).rows:
        if row.is_converted and row.layer is not None:
            before = sets[set_name(row)].size if set_name(row) in sets else 0
            sets[set_name(row)] = MatrixSet((row.shape[0], row.shape[1]), before + 1)
    return sets
