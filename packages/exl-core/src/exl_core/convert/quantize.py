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
    as_factor,
    compute_type,
    read_tensor,
    stored_norm,
)
from exl_core.convert.matrix import MatrixQuantizer, QuantizedMatrix
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import CapturingPass, LayerFunction
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
from exl_core.ops.backends.autograd.table import AUTOGRAD
from exl_core.ops.elementwise import RmsNorm


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
        if row.kind is Kind.BIAS:
            tensors[row.name] = pad(values, (0, -len(values) % COLUMN_STEP)).half().cpu()
        elif row.is_norm:
            tensors[row.name] = stored_norm(row, values).cpu()
        else:
            tensors |= _pieces(row.stem, done[row.role])
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
    exact = LayerFunction(config, layer, source.norms(), source.products())
    stored = LayerFunction(config, layer, source.norms(is_stored=True), product)
    original = CapturingPass(exact, states.source, device, workers)
    quantized = CapturingPass(stored, states.quantized, device, workers)
    for parts, _ in zip(quantized.groups(), original.groups(), strict=True):
        statistics = measure_hessian(quantized.inputs, original.inputs, workers)
        quantizer = MatrixQuantizer(statistics, workers.check)

        def quantize(part: str, quantizer: MatrixQuantizer = quantizer) -> QuantizedMatrix:
            name = source.rows[part].name
            has_bias = source.bias(part) is not None
            layout = allocation.layout(name)
            return quantizer.quantize(name, source.matrix(part), layout, has_bias=has_bias)

        for part, matrix in zip(parts, workers.map(quantize, parts), strict=True):
            done[part], weights[part] = matrix, matrix.weight.to(dtype)
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
    norm = read_tensor(checkpoint, table.final_norm.name)
    stored = stored_norm(table.final_norm, norm)
    dtype, eps = compute_type(device), config.state_eps

    def normed(states_of: Tensor, factor: Tensor) -> list[Tensor]:
        pieces = (piece.to(device) for piece in torch.split(states_of, workers.rows_per_piece))
        final = RmsNorm(factor.to(device), eps)
        return workers.map(lambda x: AUTOGRAD.rms_norm(x, final).to(dtype), pieces)

    inputs = normed(states.quantized, as_factor(table.final_norm, stored))
    statistics = measure_hessian(inputs, normed(states.source, norm), workers)
    layout = Layout.parse(HEAD_LAYOUTS[options.head_bits])
    matrix = MatrixQuantizer(statistics, workers.check).quantize(
        table.head.name, head.to(device), layout
    )
    tensors = {table.embed.name: embed.half(), table.final_norm.name: stored}
    tensors |= _pieces(table.head.stem, matrix)
    return QuantizedPart(tensors, (matrix.report,))


def _pieces(stem: str, matrix: QuantizedMatrix) -> dict[str, Tensor]:
    return {f"{stem}.{piece}": getattr(matrix.packed, piece) for piece in exl2.PARTS}
