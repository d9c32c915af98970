"""Verifies a checkpoint by reading all of it, without packing anything.

Each tensor that the model needs is located, opened by its codec, unpacked and dequantized, one
piece at a time. A problem in one tensor does not stop the verification of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exl_core.arch.modules import ModuleRow, module_table
from exl_core.arch.quantization import Quantization
from exl_core.arch.spec import ModelConfig
from exl_core.errors import ModelError, WeightValueError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.source import Progress, TensorSource
from exl_core.ops.weights import DenseLayout

_BEYOND_FLOAT16 = 65520.0
"""The smallest magnitude that float16 rounds to infinity."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of one tensor, by its canonical name."""

    tensor: str
    error: ModelError

    def __str__(self) -> str:
        return f"{self.tensor}: {self.error}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify`.

    quantized  number of matrices that stay quantized at run time
    problems   tensors that cannot be loaded, or not on every device: GPUs compute with float16
    zeros      norms and matrices whose values, or whose scales, are all zero. They load, but a file
               of zeros in their place loads as well
    """

    tensors: int
    quantized: int
    size_bytes: int
    problems: tuple[Problem, ...]
    zeros: tuple[str, ...] = ()


def verify(
    source: TensorSource,
    config: ModelConfig,
    quantization: Quantization | None,
    progress: Progress | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> VerifyReport:
    """Verifies every tensor that the model needs. `progress` gets bytes read and total bytes.

    `dtype`: range that the values of matrices must fit; by default the dtype that they are loaded
    as.
    """
    problems: dict[str, Problem] = {}  # by text, so that a fault of a fused tensor is listed once
    found: dict[str, Checkpoint] = {}
    for row in module_table(config).rows:
        try:
            found[row.name] = Checkpoint(source, config, quantization, rows=[row])
        except ModelError as error:
            problems.setdefault(str(error), Problem(row.name, error))
    zeros: list[str] = []
    total, done, quantized = sum(one.size_bytes for one in found.values()), 0, 0
    for name, checkpoint in found.items():
        try:
            row = checkpoint.rows[name]
            quantized += row.is_matrix and not isinstance(checkpoint.layout(name), DenseLayout)
            if not _read(checkpoint, row, dtype):
                zeros.append(name)
        except ModelError as error:
            problems.setdefault(str(error), Problem(name, error))
        done += checkpoint.size_bytes
        if progress is not None:
            progress(done, total)
    return VerifyReport(len(found), quantized, total, tuple(problems.values()), tuple(zeros))


def _read(checkpoint: Checkpoint, row: ModuleRow, dtype: torch.dtype | None) -> bool:
    """Read all of a tensor. False: it is a norm or a matrix, and all its values are zero."""
    name = row.name
    if row.is_norm:
        return bool(checkpoint.norm(name).any())
    if dtype is None:
        # Codes that stay are dequantized to float32 here. Matrices that loading dequantizes must
        # fit float16 as well.
        dtype = checkpoint.layout(name).dtype if row.is_matrix else checkpoint.dtype(name)
    has_values, largest = name.endswith(".bias"), 0.0
    for chunk in checkpoint.chunks(name, dtype):
        has_values = has_values or bool(chunk.values.any())
        if row.is_matrix and dtype is not torch.float16:
            largest = max(largest, float(chunk.values.abs().max()))
    if largest >= _BEYOND_FLOAT16:
        raise WeightValueError(
            "weights are too large for float16, which GPUs compute with",
            where=checkpoint.stored[name].file,
            expected="at most 65504 in magnitude",
            got=f"{largest:g}",
            next_step="Take --device cpu, or get the model from another source.",
        )
    return has_values
