"""Quantization of one matrix to EXL3, and the loss that each rate is expected to cause.

`ldlq.py` finds the codes and scales. This module gives it the Hessian, the corrected weights and
the seed of the signs, and turns the result into the tensors of a file.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from exl_core.convert.candidates import Costs
from exl_core.convert.hessian import InputStatistics
from exl_core.convert.ldlq import DAMPING, TrellisQuantizer, initial_scales, unit_factor
from exl_core.convert.matrix import Correction, QuantizedMatrix, relative_error
from exl_core.convert.outputs import output_hessian
from exl_core.convert.plan import (
    AnyLayout,
    ConvertOptions,
    Incident,
    MatrixReport,
    TrellisCodes,
)
from exl_core.convert.sensitivity import Sensitivity
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.exl3.matrix import stored_size
from exl_core.ops.open import get_table
from exl_core.ops.rings import RingOps
from exl_core.ops.weights import TRELLIS_RATES
from exl_core.settings import read_settings

DISTORTION: Mapping[float, float] = dict(
    zip(
        TRELLIS_RATES,
        (1.13, 1.14, 1.13, 1.20, 1.20, 1.19, 1.16, 1.26, 1.33, 1.35, 1.39),
        strict=True,
    )
)
"""Mean squared error of the search on normal variables by rate, over the bound 4^-rate. The
codebooks differ by less than a tenth. Values of a rotated matrix are close to normal."""


@lru_cache(maxsize=1)
def open_rings(device: torch.device) -> RingOps:
    """The search of rings on a device. It uses all threads for one matrix."""
    return get_table(str(device), threads=read_settings().threads)


class Exl3Quantizer:
    """Quantizes matrices that read the same input; `group` is the name of the first of them.

    They have the same signs of inputs. `sensitivity` is that of every matrix by name
    (`sensitivity.py`). `check` is called between pieces of work and may raise.
    """

    def __init__(
        self,
        statistics: InputStatistics,
        group: str,
        options: ConvertOptions,
        sensitivity: Sensitivity,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._statistics = statistics
        self._sensitivity = sensitivity
        self._is_usable = _is_usable(statistics.hessian)
        self._correction = Correction(statistics) if self._is_usable else None
        self._seed = zlib.crc32(f"{options.seed} {group}".encode())
        self._check = check

    def quantize(
        self, name: str, weight: Tensor, layout: AnyLayout, *, has_bias: bool = False
    ) -> QuantizedMatrix:
        """Quantizes `weight` float32 [out, in]; without feedback if the Hessian is unusable."""
        assert isinstance(layout, TrellisCodes), "chosen among the candidates of EXL3"
        source = weight.T.contiguous()  # [in, out]
        k, n = source.shape
        target = source if self._correction is None else self._correction.target(source)
        sensitivity, hessian = self._sensitivity.get(name), self._statistics.hessian
        if not self._is_usable:
            hessian = torch.eye(k).to(hessian)
        elif sensitivity is not None:
            hessian = self._statistics.weighted(sensitivity.first)
        quantizer = TrellisQuantizer(
            hessian, open_rings(hessian.device), seed=self._seed, check=self._check
        )
        outputs = None
        if sensitivity is not None:
            outputs = output_hessian(sensitivity.outputs, sensitivity.pairs, stored_size(n))
        linear = quantizer.quantize(target, layout.rate, layout.codebook, outputs).linear
        pieces = {"suh": linear.suh, "svh": linear.svh, "trellis": linear.trellis}
        if layout.codebook != "3inst":
            multiplier = torch.tensor(exl3.MULTIPLIERS[layout.codebook])
            pieces[layout.codebook] = multiplier.to(torch.int32)  # as a signed number
        # The weights that readers of these tensors see. One CPU core would take 0.2 s or more to
        # decode a matrix, longer than a GPU takes to quantize it.
        stored = exl3.check(pieces, name).to(source.device)
        result = exl3.dequantize(stored, 0, stored.out_features)[:k, :n].to(source)
        report = MatrixReport(
            name,
            str(layout),
            layout.cost_bits(k, n, has_bias=has_bias),
            relative_error(result, source, self._statistics.hessian),
            self._incidents(name),
        )
        return QuantizedMatrix(pieces, result.T.contiguous(), report)

    def _incidents(self, name: str) -> tuple[Incident, ...]:
        if self._is_usable:
            return ()
        return (Incident(name, "rounded", "the Hessian of its inputs is not finite and positive"),)


def _is_usable(hessian: Tensor) -> bool:
    mean = float(hessian.diagonal().double().mean())
    return mean > 0 and bool(torch.isfinite(hessian).all())


def expected_losses(
    weight: Tensor,
    hessian: Tensor,
    sensitivity: Tensor,
    layouts: Iterable[TrellisCodes],
    by_token: Tensor | None = None,
) -> Costs:
    """Expected increase of the loss for each layout of a matrix, in nats per token.

    `weight` [out, in], `sensitivity` [out] of its outputs. `hessian` [in, in] is that of the
    feedback, and `by_token` the one with the weights of tokens; None: the same. In the rotated and
    scaled form of a matrix the error of every weight has the same variance, which depends on the
    rate only. The rows before it then make up for a part of its effect (`ldlq.py`). So nothing has
    to be encoded.
    """
    (n, k), (columns, rows) = weight.shape, map(stored_size, weight.shape)
    source = pad(weight.T.double(), (0, columns - n, 0, rows - k))
    outputs = output_hessian(sensitivity, None, columns).to(source.device)
    suh, svh = initial_scales(source, outputs.diagonal, 0)

    def rotated(inputs: Tensor) -> Tensor:
        inputs = pad(inputs.double(), (0, rows - k, 0, rows - k))
        return exl3.rotate(exl3.rotate(suh[:, None] * inputs * suh).T)

    is_usable = _is_usable(hessian)
    own = rotated(hessian if is_usable else torch.eye(k).to(source))
    cost = own if by_token is None or not is_usable else rotated(by_token)
    trace = _remaining(cost, own)
    loss = float((sensitivity.double() * svh[:n].square()).sum() * trace / 2)
    return {one: [DISTORTION[one.rate] * 4.0**-one.rate * loss] for one in layouts}


def _remaining(cost: Tensor, hessian: Tensor) -> Tensor:
    """Sum of the output errors on the Hessian M for errors of unit variance: tr(L^-1 M L^-T) with
    the M of `cost`. L D L' factorizes the damped Hessian of the feedback. Both are rotated."""
    factor = unit_factor(hessian, DAMPING)
    if factor is None:
        return cost.diagonal().sum()
    eye = torch.eye(len(factor)).to(cost)
    inverse = torch.linalg.solve_triangular(
        factor.double() + eye, eye, upper=False, unitriangular=True
    )
    remaining: Tensor = ((inverse @ cost) * inverse).sum()
    return remaining
