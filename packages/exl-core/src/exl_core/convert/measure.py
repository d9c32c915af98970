"""Measurement of one layer: expected loss for every candidate layout of every matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.convert.candidates import Costs, cost_of, layouts_for
from exl_core.convert.gptq import Variant, factorize, identity_factor, quantize_columns
from exl_core.convert.hessian import measure_hessian
from exl_core.convert.layers import LayerSource
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import CapturingPass, LayerFunction
from exl_core.convert.plan import (
    GROUP_SIZES,
    WIDTHS,
    Candidate,
    ConvertOptions,
    LayerMeasurement,
    Layout,
    MatrixMeasurement,
    Section,
    padded,
)
from exl_core.convert.sensitivity import Sensitivity

TRIALS = 8
MEASURED_ROWS = 16  # calibration rows; comparing layouts needs fewer rows than computing codes
CPU_COLUMNS, GPU_VALUES = 4096, 1 << 28
"""Most columns in one job on a CPU, most values on a GPU. A form of a matrix is one width and group
size; forms are quantized side by side. On a CPU, 32 rows of 4096 columns fill the cache. A GPU is
faster the wider a job is, up to 1 GB for the copies of the matrix in all its forms."""

_Job = list[tuple[str, tuple[int, int]]]
"""Pairs of a matrix and a form, which is a width and a group size."""

FAST_SIZES = dict.fromkeys(WIDTHS, (64,)) | {4: GROUP_SIZES}
"""Group sizes that are measured at each width with `fast`. The costs of the others are derived from
the costs at 4 bits."""


@torch.no_grad()
def measure_layer(
    source: LayerSource,
    config: ModelConfig,
    states: Tensor,
    sensitivity: Sensitivity,
    *,
    options: ConvertOptions,
    workers: Workers,
) -> LayerMeasurement:
    """Measures all matrices of a layer.

    `states` float32 [rows, length, hidden] are replaced by those after the (unquantized) layer.
    """
    measured: list[MatrixMeasurement] = []
    function = LayerFunction(config, source.layer, source.vectors(), source.products())
    layer_pass = CapturingPass(function, states, source.device, workers)
    for parts in layer_pass.groups():
        hessian = measure_hessian(layer_pass.inputs, None, workers).hessian
        measured += _measure(
            source, parts, hessian, sensitivity=sensitivity, options=options, workers=workers
        )
    return LayerMeasurement(source.layer, tuple(measured))


def _measure(
    source: LayerSource,
    parts: tuple[str, ...],
    hessian: Tensor,
    *,
    sensitivity: Sensitivity,
    options: ConvertOptions,
    workers: Workers,
) -> list[MatrixMeasurement]:
    """Measures `parts`, which read the same input with the Hessian `hessian`."""
    factor = factorize(hessian) or identity_factor(len(hessian), hessian.device)
    sizes = FAST_SIZES if options.fast else dict.fromkeys(WIDTHS, GROUP_SIZES)
    forms = [(bits, size) for bits in WIDTHS for size in sizes[bits]]

    def run(job: _Job) -> list[list[float]]:
        distinct = {part for part, _ in job}
        stored = {part: source.matrix(part).T[factor.order] for part in distinct}  # [in, out]
        sensitivities = [sensitivity[source.rows[part].name].to(hessian.device) for part, _ in job]
        variants, first = [], 0
        for part, (bits, size) in job:
            k, n = stored[part].shape
            groups = Layout((Section(bits, 100, size),)).groups(k)
            variants.append(Variant(slice(first, first + n), groups))
            first += n
        weight = torch.cat([stored[part] for part, _ in job], 1)
        weights = torch.cat(sensitivities)
        rounded = quantize_columns(weight, factor, variants, TRIALS, weights, check=workers.check)
        return [costs.tolist() for costs in (rounded.cost / 2).T]

    columns = GPU_VALUES // len(hessian) if hessian.is_cuda else CPU_COLUMNS
    jobs = _split_into_jobs(
        [(part, form) for part in parts for form in forms],
        [len(source.matrix(part)) for part in parts for _ in forms],
        columns,
    )
    costs_of_jobs = (costs for results in workers.map(run, jobs) for costs in results)
    measured = []
    for part in parts:
        costs = _fill_in_sizes({form: next(costs_of_jobs) for form in forms})
        n, k = source.matrix(part).shape
        has_bias = source.bias(part) is not None
        candidates = tuple(
            Candidate(
                str(layout), layout.cost_bits(k, n, has_bias=has_bias), cost_of(layout, k, costs)
            )
            for layout in layouts_for(k)
        )
        measured.append(MatrixMeasurement(source.rows[part].name, k * padded(n), candidates))
    return measured


def _split_into_jobs(forms_of_parts: _Job, widths: Sequence[int], columns: int) -> list[_Job]:
    """Splits the forms, in order, into jobs of at most `columns` columns or of a single form."""
    jobs: list[_Job] = []
    capacity = 0
    for part_form, width in zip(forms_of_parts, widths, strict=True):
        if not jobs or width > capacity:
            jobs.append([])
            capacity = columns
        jobs[-1].append(part_form)
        capacity -= width
    return jobs


def _fill_in_sizes(costs: dict[tuple[int, int], list[float]]) -> Costs:
    """Adds the group sizes that were not measured, with the cost ratios they have at 4 bits."""
    filled = dict(costs)
    for bits in WIDTHS:
        for size in GROUP_SIZES:
            if (bits, size) not in filled:
                filled[bits, size] = [
                    cost * other / known if known > 0 else cost
                    for cost, other, known in zip(
                        costs[bits, 64], costs[4, size], costs[4, 64], strict=True
                    )
                ]
    return filled
