"""Quantization of one layer, and of the head, on the outputs of the quantized layers before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from exl_core.arch.modules import Kind, ModuleRow, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.convert.experts import Routes, expert_keys, minimum_rows
from exl_core.convert.hessian import InputStatistics, measure_hessian
from exl_core.convert.layers import (
    LayerSource,
    States,
    compute_type,
    in_file_order,
    in_model_order,
    product_of,
    product_type,
    read_final_norm,
    read_tensor,
    stored_vector,
)
from exl_core.convert.matrix import MatrixQuantizer, QuantizedMatrix, Quantizer
from exl_core.convert.measurement import set_name
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import ROUTER, CapturingPass, LayerFunction, final_states
from exl_core.convert.plan import Allocation, ConvertOptions, Incident, MatrixReport
from exl_core.convert.sensitivity import MatrixSensitivity, Sensitivity
from exl_core.convert.target import target_of
from exl_core.convert.trellis import Exl3Quantizer
from exl_core.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """Tensors with the names and in the order of the output file, on the CPU."""

    tensors: Mapping[str, Tensor]
    reports: tuple[MatrixReport, ...]


@torch.no_grad()
def quantize_layer(
    source: LayerSource,
    config: ModelConfig,
    allocation: Allocation,
    states: States,
    workers: Workers,
    *,
    options: ConvertOptions,
    sensitivity: Sensitivity,
) -> QuantizedPart:
    """Quantizes one layer: all its tensors. `states` are replaced by those after the layer."""
    target = target_of(options)
    quantizer = _LayerQuantizer(
        source, config, allocation, workers, options=options, sensitivity=sensitivity
    )
    quantizer.run(states)
    tensors: dict[str, Tensor] = {}
    for row in module_table(config).rows_of(source.layer):
        values = source.tensors[row.name]
        if row.is_converted:
            tensors |= named_pieces(row.stem, quantizer.pieces[row.key])
        elif row.is_matrix:
            tensors[row.name] = values.half().cpu()
        elif row.kind is Kind.BIAS and row.packed is not None:
            padding = (0, -len(values) % target.bias_step)
            tensors[row.name] = pad(in_file_order(row, values), padding).half().cpu()
        else:
            stored = stored_vector(row, values, repeats_norms=target.repeats_norms)
            tensors[row.name] = stored.cpu()
    reports = quantizer.reports
    return QuantizedPart(tensors, tuple(reports[key] for key in source.matrix_keys))


class _LayerQuantizer:
    """Quantizes the matrices of one layer on the outputs of the quantized ones before it.

    `pieces` and `reports` are the results by key.
    """

    def __init__(
        self,
        source: LayerSource,
        config: ModelConfig,
        allocation: Allocation,
        workers: Workers,
        *,
        options: ConvertOptions,
        sensitivity: Sensitivity,
    ) -> None:
        self.pieces: dict[str, Mapping[str, Tensor]] = {}
        self.reports: dict[str, MatrixReport] = {}
        self._source = source
        self._config = config
        self._allocation = allocation
        self._workers = workers
        self._options = options
        self._sensitivity = {
            row.name: _in_file_order(row, sensitivity[row.name])
            for row in source.rows.values()
            if row.name in sensitivity
        }
        self._weights = source.kept(is_stored=True)  # and the finished matrices

    def run(self, states: States) -> None:
        """Quantizes all matrices, and replaces `states` by those after the layer."""
        source, config, workers = self._source, self._config, self._workers
        exact = LayerFunction(config, source.layer, source.vectors(), source.products())
        product = product_of(self._weights, source.bias)
        stored = LayerFunction(config, source.layer, source.vectors(is_stored=True), product)
        original = CapturingPass(exact, states.source, source.device, workers)
        quantized = CapturingPass(stored, states.quantized, source.device, workers)
        for keys, _ in zip(quantized.groups(), original.groups(), strict=True):
            matrices = tuple(key for key in keys if key != ROUTER)
            self._quantize(matrices, quantized.inputs, original.inputs)
            if ROUTER in keys:  # after `latent_down`, whose outputs experts may read
                self._quantize_experts(quantized, original)

    def _quantize(
        self, keys: tuple[str, ...], inputs: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        """Quantizes matrices that read `inputs`, pieces [R, T, K]. `sources` are the inputs of the
        source's matrices on the same tokens."""
        if not keys:
            return
        statistics = measure_hessian(inputs, sources, self._workers)
        group = self._source.rows[keys[0]].name
        quantizer = _quantizer(group, statistics, self._options, self._sensitivity, self._workers)
        source = self._source

        def quantize(key: str) -> QuantizedMatrix:
            row = source.rows[key]
            has_bias = source.bias(key) is not None
            layout = self._allocation.layout(set_name(row))
            weight = in_file_order(row, source.matrix(key))
            return quantizer.quantize(row.name, weight, layout, has_bias=has_bias)

        is_threaded = self._options.format == "exl3"  # each matrix uses all threads
        done = map(quantize, keys) if is_threaded else self._workers.map(quantize, keys)
        for key, matrix in zip(keys, done, strict=True):
            self.pieces[key] = matrix.pieces
            self.reports[key] = matrix.report
            weight = in_model_order(source.rows[key], matrix.weight)
            self._weights[key] = weight.to(product_type(source.rows[key], source.device))

    def _quantize_experts(self, quantized: CapturingPass, original: CapturingPass) -> None:
        """Quantizes the experts one by one, each on the rows that the quantized layer routes to it
        (`experts.py`). The passes are at the router."""
        layer, workers = self._source.layer, self._workers
        routes = Routes.of(quantized.function, quantized.inputs, workers)
        own = (
            routes
            if routes.weights is None
            else Routes.of(original.function, original.inputs, workers)
        )
        inputs, sources = quantized.expert_inputs(), original.expert_inputs()
        minimum = minimum_rows(self._config, layer)
        counts: list[int] = []
        for expert, gate_up, down in expert_keys(self._config, layer):
            rows, chosen = routes.rows_of(expert, minimum)
            x = routes.inputs_of(expert, rows, inputs)
            s = own.inputs_of(expert, rows, sources)
            self._quantize(gate_up, [x[None]], [s[None]])
            inner, exact_inner = (
                one.function.expert_inner(expert, h)[None].to(x)
                for one, h in ((quantized, x), (original, s))
            )
            self._quantize(down, [inner], [exact_inner])
            counts.append(chosen)
        self._report_few_rows(counts, min(minimum, len(routes.ids)))

    def _report_few_rows(self, counts: Sequence[int], minimum: int) -> None:
        """Adds an incident to the first expert that fewer than `minimum` rows chose."""
        few = [index for index, count in enumerate(counts) if count < minimum]
        if not few:
            return
        experts = expert_keys(self._config, self._source.layer)
        key = next(one.gate_up[0] for one in experts if one.expert == few[0])
        detail = (
            f"{len(few)} of {len(counts)} experts were chosen by fewer than {minimum} rows, the"
            f" least used by {min(counts)}, and read the rows with the next scores too"
        )
        incident = Incident(set_name(self._source.rows[key]), "few rows", detail)
        report = self.reports[key]
        self.reports[key] = replace(report, incidents=(*report.incidents, incident))


@torch.no_grad()
def quantize_ends(
    checkpoint: Checkpoint,
    config: ModelConfig,
    states: States,
    options: ConvertOptions,
    workers: Workers,
) -> QuantizedPart:
    """Embedding, final norm and quantized head, from the states after the last layer. A tied model
    gets a separate head."""
    device = torch.device(options.device)
    table = module_table(config)
    embed = read_tensor(checkpoint, table.embed.name)
    head = embed if table.is_tied else read_tensor(checkpoint, table.head.name)
    dtype = compute_type(device)

    def normed(states_of: Tensor, *, is_stored: bool) -> list[Tensor]:
        vectors = read_final_norm(checkpoint, config, is_stored=is_stored)
        norm = {role: x.to(device) for role, x in vectors.items()}
        pieces = (piece.to(device) for piece in torch.split(states_of, workers.rows_per_piece))
        return workers.map(lambda x: final_states(config, norm, x).to(dtype), pieces)

    inputs = normed(states.quantized, is_stored=True)
    statistics = measure_hessian(inputs, normed(states.source, is_stored=False), workers)
    tensors = {table.embed.name: embed.half()}
    for row in table.rows_of(None):
        if not row.is_matrix:
            tensors[row.name] = stored_vector(row, read_tensor(checkpoint, row.name))
    layout = target_of(options).head_layout(options.head_bits)
    if layout is None:
        tensors[table.head.name] = head.half()
        return QuantizedPart(tensors, ())
    quantizer = _quantizer(table.head.name, statistics, options, {}, workers)
    matrix = quantizer.quantize(table.head.name, head.to(device), layout)
    tensors |= named_pieces(table.head.stem, matrix.pieces)
    return QuantizedPart(tensors, (matrix.report,))


def _quantizer(
    group: str,
    statistics: InputStatistics,
    options: ConvertOptions,
    sensitivity: Sensitivity,
    workers: Workers,
) -> Quantizer:
    """Quantizer of matrices that read the same input. `group` is the name of the first of them."""
    if options.format == "exl2":
        return MatrixQuantizer(statistics, sensitivity, workers.check)
    return Exl3Quantizer(statistics, group, options, sensitivity, workers.check)


def _in_file_order(row: ModuleRow, sensitivity: MatrixSensitivity) -> MatrixSensitivity:
    return sensitivity._replace(outputs=in_file_order(row, sensitivity.outputs))


def named_pieces(stem: str, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{stem}.{piece}": tensor for piece, tensor in pieces.items()}
