"""Measuring one layer: what every candidate layout of every matrix would cost in quality."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.arch.key_map import layer_prefix
from exl_core.arch.spec import ModelConfig
from exl_core.convert.candidates import Costs, cost_of, layouts_for
from exl_core.convert.gptq import Variant, factorize, plain_factor, quantize_columns
from exl_core.convert.layers import LayerSource
from exl_core.convert.moments import measure_moments
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
    crew: Workers,
) -> LayerMeasurement:
    """`states` float32 [rows, length, hidden] become those after the (unquantized) layer."""
    measured: list[MatrixMeasurement] = []
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
    prefix = layer_prefix(source.layer)
    sizes = FAST_SIZES if options.fast else dict.fromkeys(WIDTHS, GROUP_SIZES)
    forms = [(bits, size) for bits in WIDTHS for size in sizes[bits]]

    def run(job: _Job) -> list[list[float]]:
        wanted = {part for part, _ in job}
        stored = {part: source.matrix(part).T[factor.order] for part in wanted}  # [in, out]
        felt = [sensitivity[f"{prefix}{part}.weight"].to(hessian.device) for part, _ in job]
        variants, first = [], 0
        for part, (bits, size) in job:
            k, n = stored[part].shape
            groups = Layout((Section(bits, 100, size),)).groups(k)
            variants.append(Variant(slice(first, first + n), groups))
            first += n
        weight = torch.cat([stored[part] for part, _ in job], 1)
        weights = torch.cat(felt)
        rounded = quantize_columns(weight, factor, variants, TRIALS, weights, check=crew.check)
        return [one.tolist() for one in (rounded.cost / 2).T]

    columns = GPU_VALUES // len(hessian) if hessian.is_cuda else CPU_COLUMNS
    jobs = _side_by_side(
        [(part, form) for part in parts for form in forms],
        [len(source.matrix(part)) for part in parts for _ in forms],
        columns,
    )
    found = (costs for results in crew.each(run, jobs) for costs in results)
    measured = []
    for part in parts:
        costs = _all_sizes({form: next(found) for form in forms})
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


def _side_by_side(tried: _Job, widths: Sequence[int], columns: int) -> list[_Job]:
    """Cut, in order, into jobs of at most so many columns, or of one matrix."""
    jobs: list[_Job] = []
    room = 0
    for one, width in zip(tried, widths, strict=True):
        if not jobs or width > room:
            jobs.append([])
            room = columns
        jobs[-1].append(one)
        room -= width
    return jobs


def _all_sizes(costs: dict[tuple[int, int], list[float]]) -> Costs:
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
