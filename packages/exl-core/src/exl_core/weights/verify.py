"""Reading all of a checkpoint to see whether it is sound, without packing any of it.

Every tensor that the model needs is looked up, opened by its codec, unpacked and dequantized, one
piece at a time; what is wrong with one does not keep the others from being looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exl_core.arch.key_map import expected_tensors
from exl_core.arch.quantization import Quantization
from exl_core.arch.spec import ModelConfig
from exl_core.errors import ModelError
from exl_core.weights.checkpoint import Checkpoint
from exl_core.weights.source import Progress, TensorSource


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a tensor, by our name for it."""

    tensor: str
    error: ModelError

    def __str__(self) -> str:
        return f"{self.tensor}: {self.error}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`quantized` counts the matrices that are computed with as codes."""

    tensors: int
    quantized: int
    size_bytes: int
    problems: tuple[Problem, ...]


def verify(
    source: TensorSource,
    config: ModelConfig,
    quantization: Quantization | None,
    progress: Progress | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> VerifyReport:
    """Looks at every tensor that the model needs; `progress` gets bytes read and bytes in all.
    `dtype`: what the values of matrices must fit into; by default what they are loaded as."""
    problems: dict[str, Problem] = {}  # by text: parts of one stored tensor share its faults
    found: dict[str, Checkpoint] = {}
    for name, shape in expected_tensors(config).items():
        try:
            found[name] = Checkpoint(source, config, quantization, tensors={name: shape})
        except ModelError as error:
            problems.setdefault(str(error), Problem(name, error))
    total, done, quantized = sum(one.size_bytes for one in found.values()), 0, 0
    for name, checkpoint in found.items():
        try:
            _read(checkpoint, name, dtype)
        except ModelError as error:
            problems.setdefault(str(error), Problem(name, error))
        quantized += checkpoint.is_quantized(name)
        done += checkpoint.size_bytes
        if progress is not None:
            progress(done, total)
    return VerifyReport(len(found), quantized, total, tuple(problems.values()))


def _read(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> None:
    if name.endswith("norm.weight"):
        checkpoint.norm(name)
        return
    if dtype is None:
        # Codes are multiplied out as float32; what is dequantized at load must fit float16 as well.
        dtype = torch.float32 if checkpoint.is_quantized(name) else checkpoint.dtype(name)
    for _ in checkpoint.chunks(name, dtype):
        pass
