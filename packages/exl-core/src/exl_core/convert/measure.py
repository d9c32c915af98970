"""Measuring one layer: what every candidate layout of every matrix would cost in quality."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.arch.key_map import layer_prefix
from exl_core.arch.spec import ModelConfig
from exl_core.convert.gptq import factorize, plain_factor, quantize_columns
from exl_core.convert.layers import LayerSource
from exl_core.convert.moments import measure_moments
from exl_core.convert.parallel import Workers, workers
from exl_core.convert.plan import (
    Candidate,
    ConvertOptions,
    LayerMeasurement,
    Layout,
    MatrixMeasurement,
    padded,
)
from exl_core.convert.sensitivity import Sensitivity
from exl_core.convert.stream import Stream

TRIALS = 8

CANDIDATES = (
    *("2:100/128", "2:100/64", "3:5/64 2:95/64", "3:10/64 2:90/64", "3:25/64 2:75/64"),
    *("6:5/32 3:20/64 2:75/64", "3:50/64 2:50/64", "3:75/64 2:25/64", "3:100/128", "3:100/64"),
    *("3:100/32", "5:5/32 3:95/32", "8:5/32 3:95/64", "4:10/128 3:90/128", "4:10/64 3:90/64"),
    *("4:10/32 3:90/32", "8:5/32 4:10/128 3:85/128", "8:5/32 4:10/32 3:85/32"),
    *("4:25/128 3:75/128", "4:25/32 3:75/32", "4:50/128 3:50/128", "4:75/128 3:25/128"),
    *("4:100/128", "4:100/64", "4:100/32", "5:10/128 4:90/128", "5:10/32 4:90/32"),
    *("5:5/32 4:95/32", "8:5/32 4:95/128", "8:5/32 4:95/32", "8:5/32 5:10/128 4:85/128"),
    *("5:25/128 4:75/128", "5:50/128 4:50/128", "5:75/128 4:25/128", "5:100/128", "5:100/64"),
    *("5:100/32", "8:5/32 5:95/128", "6:10/128 5:90/128", "6:25/128 5:75/128", "6:50/128 5:50/128"),
    *("8:5/32 6:10/128 5:85/128", "6:100/128", "6:100/32", "8:5/32 6:95/128"),
    *("8:15/128 6:85/128", "8:50/128 6:50/128", "8:100/128", "8:100/32"),
)
FAST_CANDIDATES = (
    *("2:100/64", "3:10/64 2:90/64", "3:25/64 2:75/64", "6:5/32 3:20/64 2:75/64"),
    *("3:50/64 2:50/64", "3:100/64", "3:100/32", "4:10/64 3:90/64", "4:25/128 3:75/128"),
    *("4:50/128 3:50/128", "4:100/128", "4:100/32", "5:25/128 4:75/128", "5:50/128 4:50/128"),
    *("5:100/128", "5:100/32", "6:25/128 5:75/128", "6:100/128", "8:15/128 6:85/128", "8:100/128"),
)


@torch.no_grad()
def measure_layer(
    source: LayerSource,
    config: ModelConfig,
    states: Tensor,
    sensitivity: Sensitivity,
    options: ConvertOptions,
) -> LayerMeasurement:
    """`states` float32 [rows, length, hidden] become those after the (unquantized) layer."""
    measured: list[MatrixMeasurement] = []
    with workers(source.device) as crew:
        stream = Stream(source.block(config), source.products(), states, source.device, crew)
        for parts in stream.steps():
            hessian = measure_moments(stream.inputs, None, crew).hessian
            measured += _measure(
                source, parts, hessian, sensitivity=sensitivity, options=options, crew=crew
            )
    return LayerMeasurement(source.layer, tuple(measured))


def _measure(
    source: LayerSource,
    parts: tuple[str, ...],
    hessian: Tensor,
    *,
    sensitivity: Sensitivity,
    options: ConvertOptions,
    crew: Workers,
) -> list[MatrixMeasurement]:
    """`parts` read the same input, of second moments `hessian`."""
    factor = factorize(hessian) or plain_factor(len(hessian), hessian.device)
    texts = FAST_CANDIDATES if options.fast else CANDIDATES
    jobs = [(part, text) for part in parts for text in texts]

    def run(job: tuple[str, str]) -> Candidate:
        part, text = job
        weight = source.matrix(part).T[factor.order].contiguous()  # [in, out]
        layout = Layout.parse(text)
        k, n = weight.shape
        rounded = quantize_columns(weight, factor, layout.groups(k), TRIALS)
        name = f"{layer_prefix(source.layer)}{part}.weight"
        weights = sensitivity[name].to(weight.device)
        error = float((rounded.cost.double() * weights).sum()) / 2
        return Candidate(
            text, layout.cost_bits(k, n, has_bias=source.bias(part) is not None), error
        )

    results = iter(crew.each(run, jobs))
    measured = []
    for part in parts:
        k, n = source.matrix(part).T.shape
        name = f"{layer_prefix(source.layer)}{part}.weight"
        candidates = tuple(next(results) for _ in texts)
        measured.append(MatrixMeasurement(name, k * padded(n), candidates))
    return measured
