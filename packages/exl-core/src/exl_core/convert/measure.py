"""Measurement of one layer: expected loss for every candidate layout of every matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.convert.candidates import Costs, cost_of
from exl_core.convert.experts import Routes, expert_keys, minimum_rows
from exl_core.convert.gptq import (
    Variant,
    cost_curvature,
    factorize,
    identity_factor,
    quantize_columns,
)
from exl_core.convert.hessian import InputStatistics, measure_hessian, token_hessian
from exl_core.convert.layers import LayerSource
from exl_core.convert.measurement import set_name
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import ROUTER, CapturingPass, LayerFunction
from exl_core.convert.plan import (
    GROUP_SIZES,
    WIDTHS,
    Candidate,
    ConvertOptions,
    LayerMeasurement,
    Layout,
    MatrixMeasurement,
    Section,
    TrellisCodes,
)
from exl_core.convert.sensitivity import Sensitivity
from exl_core.convert.target import Target, target_of
from exl_core.convert.trellis import expected_losses

TRIALS = 8
MEASURED_ROWS = 16  # calibration rows; comparing layouts needs fewer rows than computing codes
CPU_COLUMNS, GPU_VALUES = 4096, 1 << 28
"""Most columns in one job on a CPU, most values on a GPU. A form of a matrix is one width and group
size; forms are quantized side by side. On a CPU, 32 rows of 4096 columns fill the cache. A GPU is
faster the wider a job is, up to 1 GB for the copies of the matrix in all its forms."""

_Job = list[tuple[str, tuple[int, int]]]
"""Pairs of the key of a matrix and a form, which is a width and a group size."""

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
    layer = _LayerMeasurer(source, config, sensitivity, options, workers)
    function = LayerFunction(config, source.layer, source.vectors(), source.products())
    layer_pass = CapturingPass(function, states, source.device, workers)
    measured: list[MatrixMeasurement] = []
    for keys in layer_pass.groups():
        if ROUTER in keys:
            measured += layer.measure_experts(layer_pass)
        measured += layer.measure([key for key in keys if key != ROUTER], layer_pass.inputs)
    return LayerMeasurement(source.layer, tuple(measured))


@dataclass(frozen=True, slots=True)
class _LayerMeasurer:
    """Measures the matrices of one layer."""

    source: LayerSource
    config: ModelConfig
    sensitivity: Sensitivity
    options: ConvertOptions
    workers: Workers

    @property
    def _target(self) -> Target:
        return target_of(self.options)

    def measure(self, keys: Sequence[str], inputs: Sequence[Tensor]) -> Iterator[MatrixMeasurement]:
        """Measures matrices that read the same inputs, pieces [R, T, K]."""
        if keys:
            for key, costs in self._costs(keys, inputs).items():
                yield self._measurement(key, costs, 1)

    def measure_experts(self, layer_pass: CapturingPass) -> Iterator[MatrixMeasurement]:
        """Measures the experts, each on its own rows. The pass is at the router. The costs of a
        layout are summed over the experts: their sensitivities already count how often each is
        used."""
        layer, sums = self.source.layer, dict[str, Costs]()
        routes = Routes.of(layer_pass.function, layer_pass.inputs, self.workers)
        inputs = layer_pass.expert_inputs()
        minimum = minimum_rows(self.config, layer)
        experts = list(expert_keys(self.config, layer))
        for expert, gate_up, down in experts:
            x = routes.inputs_of(expert, routes.rows_of(expert, minimum).rows, inputs)
            costs = self._costs(gate_up, [x[None]])
            inner = layer_pass.function.expert_inner(expert, x)[None].to(x)
            costs |= self._costs(down, [inner])
            for key, own in costs.items():
                role = self.source.rows[key].role
                sums[role] = _added(sums[role], own) if role in sums else own
        first = experts[0]
        for key in (*first.gate_up, *first.down):
            yield self._measurement(key, sums[self.source.rows[key].role], len(experts))

    def _measurement(self, key: str, costs: Costs, count: int) -> MatrixMeasurement:
        """Candidates of a matrix, or of `count` matrices of experts of which it is one. `costs` are
        their sums."""
        (n, k), has_bias = self.source.matrix(key).shape, self.source.bias(key) is not None
        candidates = tuple(
            Candidate(
                str(layout),
                layout.cost_bits(k, n, has_bias=has_bias) * count,
                cost_of(layout, k, costs),
            )
            for layout in self._target.layouts_for(k)
        )
        name = set_name(self.source.rows[key])
        return MatrixMeasurement(name, self._target.num_weights(k, n) * count, candidates)

    def _costs(self, keys: Sequence[str], inputs: Sequence[Tensor]) -> dict[str, Costs]:
        """Costs of matrices that read the same inputs, by key."""
        statistics = measure_hessian(inputs, None, self.workers)
        if self.options.format == "exl2":
            return self._costs_of_groups(keys, statistics, inputs)
        by_token = {key: self._by_token(key, inputs) for key in keys}

        def run(key: str) -> Costs:
            weight, own = self.source.matrix(key), self.sensitivity[self.source.rows[key].name]
            return expected_losses(
                weight,
                statistics.weighted(own.first),
                own.outputs.to(weight),
                self._target.trellis_layouts,
                by_token[key],
            )

        return dict(zip(keys, self.workers.map(run, keys), strict=True))

    def _by_token(self, key: str, inputs: Sequence[Tensor]) -> Tensor | None:
        """Hessian of a matrix with the weights of the tokens; None if these are equal."""
        tokens = self.sensitivity[self.source.rows[key].name].tokens
        return token_hessian(inputs, tokens, self.workers) if len(tokens) else None

    def _costs_of_groups(
        self, keys: Sequence[str], statistics: InputStatistics, inputs: Sequence[Tensor]
    ) -> dict[str, Costs]:
        """Costs of matrices in EXL2, by key, width and group size. Matrices whose first tokens have
        the same weight share the feedback."""
        found: dict[str, Costs] = {}
        weights = {key: self.sensitivity[self.source.rows[key].name].first for key in keys}
        for first in dict.fromkeys(weights.values()):
            own = [key for key in keys if weights[key] == first]
            found |= self._costs_with_feedback(own, statistics.weighted(first), inputs)
        return {key: found[key] for key in keys}

    def _costs_with_feedback(
        self, keys: Sequence[str], hessian: Tensor, inputs: Sequence[Tensor]
    ) -> dict[str, Costs]:
        """The same for matrices with one Hessian of the feedback."""
        sizes = FAST_SIZES if self.options.fast else dict.fromkeys(WIDTHS, GROUP_SIZES)
        forms = [(bits, size) for bits in WIDTHS for size in sizes[bits]]
        source, sensitivity = self.source, self.sensitivity
        found = factorize(hessian)
        factor = found or identity_factor(len(hessian), hessian.device)
        curvature: dict[str, Tensor | None] = {}
        for key in keys:
            cost = None if found is None else self._by_token(key, inputs)
            curvature[key] = None if cost is None else cost_curvature(factor, cost)

        def run(job: _Job) -> list[list[float]]:
            distinct = {key for key, _ in job}
            stored = {key: source.matrix(key).T[factor.order] for key in distinct}  # [in, out]
            sensitivities = [
                sensitivity[source.rows[key].name].outputs.to(hessian.device) for key, _ in job
            ]
            variants, first = [], 0
            for key, (bits, size) in job:
                k, n = stored[key].shape
                groups = Layout((Section(bits, 100, size),)).groups(k)
                variants.append(Variant(slice(first, first + n), groups, curvature[key]))
                first += n
            weight = torch.cat([stored[key] for key, _ in job], 1)
            weights = torch.cat(sensitivities)
            rounded = quantize_columns(
                weight, factor, variants, TRIALS, weights, check=self.workers.check
            )
            return [costs.tolist() for costs in (rounded.cost / 2).T]

        columns = GPU_VALUES // len(hessian) if hessian.is_cuda else CPU_COLUMNS
        jobs = _split_into_jobs(
            [(key, form) for key in keys for form in forms],
            [len(source.matrix(key)) for key in keys for _ in forms],
            columns,
        )
        costs_of_jobs = (costs for results in self.workers.map(run, jobs) for costs in results)
        return {key: _fill_in_sizes({form: next(costs_of_jobs) for form in forms}) for key in keys}


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


def _added(costs: Costs, others: Costs) -> Costs:
    return {
        form: [a + b for a, b in zip(own, others[form], strict=True)] for form, own in costs.items()
    }


def _fill_in_sizes(costs: Mapping[tuple[int, int], list[float]]) -> Costs:
    """Adds the group sizes that were not measured, with the cost ratios they have at 4 bits."""
    filled: dict[tuple[int, int] | TrellisCodes, list[float]] = {}
    filled.update(costs.items())
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
