"""Quantization of one matrix: source weights and input statistics become EXL2 tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.convert.gptq import (
    DAMPING,
    Variant,
    damped,
    factorize,
    identity_factor,
    quantize_columns,
)
from exl_core.convert.hessian import InputStatistics
from exl_core.convert.plan import Incident, Layout, MatrixReport
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2 import writer as exl2_writer

TRIALS = 16  # scales tried for each group and column
RIDGE = 6.0
"""Share of the mean diagonal that is added to the Hessian to solve for the correction of earlier
errors (`hessian.py`). The correction is then limited to the dominant directions of the inputs. A
small ridge gives better results on the calibration text and much worse results on other text."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """`packed` on the CPU; `weight` [out, in] as readers dequantize it, without padded columns."""

    packed: exl2.Exl2Linear
    weight: Tensor
    report: MatrixReport


class MatrixQuantizer:
    """Quantizes matrices that read the same input.

    `check` is called every 32 rows of a matrix and may raise.
    """

    def __init__(
        self, statistics: InputStatistics, check: Callable[[], None] | None = None
    ) -> None:
        self._statistics = statistics
        self._check = check
        self._factor = factorize(statistics.hessian)
        self._solver = None if self._factor is None else _solver(statistics.hessian)

    def quantize(
        self, name: str, weight: Tensor, layout: Layout, *, has_bias: bool = False
    ) -> QuantizedMatrix:
        """Quantizes `weight` float32 [out, in]; rounds it to nearest if the Hessian is unusable."""
        source = weight.T.contiguous()  # [in, out]
        k, n = source.shape
        factor, incidents = self._factor or identity_factor(k, weight.device), self._incidents(name)
        groups = layout.groups(k)
        target = self._target(source)[factor.order]
        variant = Variant(slice(n), groups)
        rounded = quantize_columns(target, factor, [variant], TRIALS, check=self._check)
        scale_codes, scale_max = rounded.scales[0]
        invperm = factor.order.argsort()
        packed = exl2_writer.pack(
            rounded.codes.cpu(),
            groups=groups,
            scale_codes=scale_codes.cpu(),
            scale_max=scale_max.cpu(),
            invperm=invperm.cpu(),
        )
        result = rounded.weight[invperm].half().float()  # [in, out]
        report = MatrixReport(
            name,
            str(layout),
            layout.cost_bits(k, n, has_bias=has_bias),
            relative_error(result, source, self._statistics.hessian),
            incidents,
        )
        return QuantizedMatrix(packed, result.T.contiguous(), report)

    def _target(self, source: Tensor) -> Tensor:
        """Weights that bring the outputs closest to the source's outputs (`hessian.py`)."""
        statistics, solver, factor = self._statistics, self._solver, self._factor
        if statistics.cross is None or solver is None or factor is None:
            return source
        correction = (statistics.cross - statistics.hessian).double() @ source.double()
        return source + torch.cholesky_solve(correction, solver).float()

    def _incidents(self, name: str) -> tuple[Incident, ...]:
        if self._factor is None:
            reason = "no damping makes the Hessian of its inputs positive definite"
            return (Incident(name, "rounded", reason),)
        if self._factor.damping > DAMPING:
            reason = f"{self._factor.damping:g} of the mean diagonal was added to its Hessian"
            return (Incident(name, "damped", reason),)
        return ()


def _solver(hessian: Tensor) -> Tensor:
    """Cholesky factor of Hessian plus ridge, in the features' own order, float64."""
    solver: Tensor = torch.linalg.cholesky(damped(hessian.double(), RIDGE))
    return solver


def relative_error(result: Tensor, source: Tensor, hessian: Tensor) -> float:
    """Energy of the output errors over the energy of the outputs; both matrices are [in, out]."""
    error = result - source
    energy = float((source * (hessian @ source)).sum(dtype=torch.float64))
    error_energy = float((error * (hessian @ error)).sum(dtype=torch.float64))
    return error_energy / energy if energy > 0 else 0.0
