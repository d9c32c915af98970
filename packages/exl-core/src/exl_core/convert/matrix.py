"""Quantization of one matrix: source weights and input statistics become EXL2 tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exl_core.convert.gptq import (
    DAMPING,
    Factor,
    Variant,
    damped,
    factorize,
    identity_factor,
    quantize_columns,
)
from exl_core.convert.hessian import InputStatistics
from exl_core.convert.plan import AnyLayout, Incident, Layout, MatrixReport
from exl_core.convert.sensitivity import Sensitivity
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2 import writer as exl2_writer

TRIALS = 16  # scales tried for each group and column
RIDGE = 6.0
"""Share of the mean diagonal that is added to the Hessian to solve for the correction of earlier
errors (`hessian.py`). The correction is then limited to the dominant directions of the inputs. A
small ridge gives better results on the calibration text and much worse results on other text."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """`pieces` are the stored tensors, on the CPU, by the end of their names; `weight` [out, in] is
    what readers dequantize, without padding."""

    pieces: Mapping[str, Tensor]
    weight: Tensor
    report: MatrixReport


class Quantizer(Protocol):
    """Quantizes matrices that read the same input, to one format."""

    def quantize(
        self, name: str, weight: Tensor, layout: AnyLayout, *, has_bias: bool = False
    ) -> QuantizedMatrix:
        """Quantizes `weight` float32 [out, in]."""
        ...


class MatrixQuantizer:
    """Quantizes matrices that read the same input.

    `sensitivity` is that of every matrix by name. `check` is called every 32 rows of a matrix and
    may raise.
    """

    def __init__(
        self,
        statistics: InputStatistics,
        sensitivity: Sensitivity,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._statistics = statistics
        self._sensitivity = sensitivity
        self._check = check
        self._factor = factorize(statistics.hessian)
        self._correction = None if self._factor is None else Correction(statistics)

    def quantize(
        self, name: str, weight: Tensor, layout: AnyLayout, *, has_bias: bool = False
    ) -> QuantizedMatrix:
        """Quantizes `weight` float32 [out, in]; rounds it to nearest if the Hessian is unusable."""
        assert isinstance(layout, Layout), "chosen among the candidates of EXL2"
        source = weight.T.contiguous()  # [in, out]
        k, n = source.shape
        found = self._factor_of(name)
        factor, incidents = found or identity_factor(k, weight.device), _incidents(name, found)
        groups = layout.groups(k)
        target = source if self._correction is None else self._correction.target(source)
        target = target[factor.order]
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
        pieces = {piece: getattr(packed, piece) for piece in exl2.PARTS}
        return QuantizedMatrix(pieces, result.T.contiguous(), report)

    def _factor_of(self, name: str) -> Factor | None:
        """Factor of the Hessian with the weight that first tokens have for this matrix."""
        sensitivity = self._sensitivity.get(name)
        if self._factor is None or sensitivity is None or sensitivity.first == 1:
            return self._factor
        return factorize(self._statistics.weighted(sensitivity.first))


def _incidents(name: str, factor: Factor | None) -> tuple[Incident, ...]:
    if factor is None:
        reason = "no damping makes the Hessian of its inputs positive definite"
        return (Incident(name, "rounded", reason),)
    if factor.damping > DAMPING:
        reason = f"{factor.damping:g} of the mean diagonal was added to its Hessian"
        return (Incident(name, "damped", reason),)
    return ()


class Correction:
    """Weights that bring the outputs closest to the source's outputs (`hessian.py`).

    The Hessian has to be finite and positive definite with a little damping.
    """

    def __init__(self, statistics: InputStatistics) -> None:
        self._statistics = statistics
        # In the features' own order, float64.
        self._solver = torch.linalg.cholesky(damped(statistics.hessian.double(), RIDGE))

    def target(self, source: Tensor) -> Tensor:
        """Weights [in, out] for the source's."""
        statistics = self._statistics
        if statistics.cross is None:
            return source
        correction = (statistics.cross - statistics.hessian).double() @ source.double()
        return source + torch.cholesky_solve(correction, self._solver).float()


def relative_error(result: Tensor, source: Tensor, hessian: Tensor) -> float:
    """Energy of the output errors over the energy of the outputs; both matrices are [in, out]."""
    error = result - source
    energy = float((source * (hessian @ source)).sum(dtype=torch.float64))
    error_energy = float((error * (hessian @ error)).sum(dtype=torch.float64))
    return error_energy / energy if energy > 0 else 0.0
