"""Measuring one layer: what every candidate layout of every matrix would cost in quality."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.arch.key_map import layer_prefix
from exl_core.arch.spec import ModelConfig
from exl_core.convert.candidates import Costs, cost_of, layouts_for
from exl_core.convert.gptq import Variant, factorize, identity_factor, quantize_columns
from exl_core.convert.hessian import measure_hessian
from exl_core.convert.layers import LayerSource
from exl_core.convert.parallel import Workers
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
from exl_core.convert.stream import Stream

TRIALS = 8
MEASURED_ROWS = 16  # layouts are compared with each other, and that takes fewer than codes do
CPU_COLUMNS, GPU_VALUES = 4096, 1 << 28
"""Forms of a matrix are tried side by side. 32 rows of so many columns fill a CPU's cache; a GPU is
the faster the wider they are, up to a copy of the matrix in all its forms of 1 GB."""

_Job = list[tuple[str, tuple[int, int]]]
"""Matrices, each in a form: its width and group size."""

FAST_SIZES = dict.fromkeys(WIDTHS, (64,)) | {4: GROUP_SIZES}
"""Group sizes that are tried at each width; others follow from how 4 bits fare with them."""


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
    """`states` float32 [rows, length, hidden] become those after the (unquantized) layer."""
    measured: list[MatrixMeasurement] = []
    stream = Stream(source.block(config), source.products(), states, source.device, workers)
    for parts in stream.steps():
        hessian = measure_hessian(stream.inputs, None, workers).hessian
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
    """`parts` read the same input, of second moments `hessian`."""
    factor = factorize(hessian) or identity_factor(len(hessian), hessian.device)
    prefix = layer_prefix(source.layer)
    sizes = FAST_SIZES if options.fast else dict.fromkeys(WIDTHS, GROUP_SIZES)
    forms = [(bits, size) for bits in WIDTHS for size in sizes[bits]]

    def run(job: _Job) -> list[list[float]]:
        distinct = {part for part, _ in job}
        stored = {part: source.matrix(part).T[factor.order] for part in distinct}  # [in, out]
        sensitivities = [
            sensitivity[f"{prefix}{part}.weight"].to(hessian.device) for part, _ in job
        ]
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
        measured.append(MatrixMeasurement(f"{prefix}{part}.weight", k * padded(n), candidates))
    return measured


def _split_into_jobs(forms_of_parts: _Job, widths: Sequence[int], columns: int) -> list[_Job]:
    """Cut, in order, into jobs of at most so many columns, or of one matrix."""
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
    """Fills in the group sizes that were left out: they change costs as they do at 4 bits."""
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
