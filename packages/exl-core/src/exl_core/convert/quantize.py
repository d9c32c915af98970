"""Quantization of one layer, and of the head, on the outputs of the quantized layers before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from exl_core.arch.modules import Kind, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.convert.hessian import measure_hessian
from exl_core.convert.layers import (
    LayerSource,
    States,
    compute_type,
    in_file_order,
    in_model_order,
    read_final_norm,
    read_tensor,
    stored_vector,
)
from exl_core.convert.matrix import MatrixQuantizer, QuantizedMatrix
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import CapturingPass, LayerFunction, final_states
from exl_core.convert.plan import (
    COLUMN_STEP,
    HEAD_LAYOUTS,
    Allocation,
    ConvertOptions,
    Layout,
    MatrixReport,
)
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import layout as exl2


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
) -> QuantizedPart:
    """Quantizes one layer: all its tensors. `states` are replaced by those after the layer."""
    done = _quantize_matrices(source, config, allocation, states, workers)
    tensors: dict[str, Tensor] = {}
    for row in module_table(config).rows_of(source.layer):
        values = source.tensors[row.name]
        if row.is_matrix:
            tensors |= _pieces(row.stem, done[row.role])
        elif row.kind is Kind.BIAS and row.packed is not None:
            padding = (0, -len(values) % COLUMN_STEP)
            tensors[row.name] = pad(in_file_order(row, values), padding).half().cpu()
        else:
            tensors[row.name] = stored_vector(row, values).cpu()
    return QuantizedPart(tensors, tuple(done[part].report for part in source.matrix_roles))


def _quantize_matrices(
    source: LayerSource,
    config: ModelConfig,
    allocation: Allocation,
    states: States,
    workers: Workers,
) -> dict[str, QuantizedMatrix]:
    """Quantizes the matrices, each on the outputs of the quantized ones before it.

    Results are by role.
    """
    device, dtype = source.device, compute_type(source.device)
    done: dict[str, QuantizedMatrix] = {}
    weights: dict[str, Tensor] = {}

    def product(part: str, x: Tensor) -> Tensor:
        bias = source.bias(part)
        return linear(x.to(dtype), weights[part], None if bias is None else bias.to(dtype))

    layer = source.layer
    exact = LayerFunction(config, layer, source.vectors(), source.products())
    stored = LayerFunction(config, layer, source.vectors(is_stored=True), product)
    original = CapturingPass(exact, states.source, device, workers)
    quantized = CapturingPass(stored, states.quantized, device, workers)
    for parts, _ in zip(quantized.groups(), original.groups(), strict=True):
        statistics = measure_hessian(quantized.inputs, original.inputs, workers)
        quantizer = MatrixQuantizer(statistics, workers.check)

        def quantize(part: str, quantizer: MatrixQuantizer = quantizer) -> QuantizedMatrix:
            row = source.rows[part]
            has_bias = source.bias(part) is not None
            layout = allocation.layout(row.name)
            weight = in_file_order(row, source.matrix(part))
            return quantizer.quantize(row.name, weight, layout, has_bias=has_bias)

        for part, matrix in zip(parts, workers.map(quantize, parts), strict=True):
            done[part] = matrix
            weights[part] = in_model_order(source.rows[part], matrix.weight).to(dtype)
    return done


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
    layout = Layout.parse(HEAD_LAYOUTS[options.head_bits])
    matrix = MatrixQuantizer(statistics, workers.check).quantize(
        table.head.name, head.to(device), layout
    )
    tensors = {table.embed.name: embed.half()}
    for row in table.rows_of(None):
        if not row.is_matrix:
            tensors[row.name] = stored_vector(row, read_tensor(checkpoint, row.name))
    tensors |= _pieces(table.head.stem, matrix)
    return QuantizedPart(tensors, (matrix.report,))


def _pieces(stem: str, matrix: QuantizedMatrix) -> dict[str, Tensor]:
    return {f"{stem}.{piece}": getattr(matrix.packed, piece) for piece in exl2.PARTS}
