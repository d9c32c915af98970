"""Stub stages for tests of the job around them: fast, without a useful result.

They depend on everything that a real stage depends on. A job that resumes with wrong states, with a
wrong layer or with stale files therefore ends with other bytes. Codes are rounded to nearest, and
the scales contain a trace of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.convert import stages
from exl_core.convert.calibration import CalibrationRows
from exl_core.convert.layers import LayerSource
from exl_core.convert.measurement import matrix_shapes
from exl_core.convert.plan import (
    HEAD_LAYOUTS,
    Allocation,
    Candidate,
    LayerMeasurement,
    Layout,
    MatrixMeasurement,
    MatrixReport,
    padded,
)
from exl_core.convert.quantize import QuantizedPart
from exl_core.convert.sensitivity import MatrixSensitivity
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2 import writer as exl2_writer

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

LAYOUTS = ("4:100/128", "6:100/64", "8:100/32")
SETTINGS = {"bits": 6.5, "rows": 3, "length": 20}


def make_rows(step: Callable[[int, int], None]) -> CalibrationRows:
    step(0, 3)
    token_ids = torch.arange(60).view(3, 20)
    return CalibrationRows(token_ids, "5" * 64, "numbers")


def read_layer(checkpoint: Any, config: Any, layer: int, device: torch.device) -> LayerSource:
    table = module_table(config)
    names = [row.name for row in table.rows_of(layer)]
    tensors = {
        name: torch.cat([chunk.values for chunk in checkpoint.chunks(name, torch.float32)])
        for name in names
    }
    return LayerSource(layer, table.layers[layer], tensors)


def embed_rows(checkpoint: Any, config: Any, token_ids: Tensor) -> Tensor:
    return token_ids[..., None].float().expand(-1, -1, config.hidden_size) / 60


def measure_sensitivity(*args: Any, **options: Any) -> dict[str, MatrixSensitivity]:
    (options["scratch"] / "states").write_bytes(b"large")
    options["on_layer"](1, 1)
    return {"sensitivity": MatrixSensitivity(torch.ones(3), torch.ones(2, 4))}


def measure_layer(
    source: LayerSource, config: Any, states: Tensor, sensitivity: Any, **_: Any
) -> LayerMeasurement:
    states.mul_(0.9).add_(0.01 * source.layer)
    trace = float(states.double().mean())
    matrices = []
    for name, (rows, columns) in matrix_shapes(config).items():
        if name in source.tensors:
            candidates = tuple(
                Candidate(text, Layout.parse(text).cost_bits(columns, rows), trace / 4**n)
                for n, text in enumerate(LAYOUTS)
            )
            matrices.append(MatrixMeasurement(name, padded(rows) * columns, candidates))
    return LayerMeasurement(source.layer, tuple(matrices))


def allocate(layers: Any, bits: float) -> Allocation:
    found = [matrix for layer in layers for matrix in layer.matrices]
    index = 2 if bits >= 8.2 else 1
    chosen = {m.name: m.candidates[index] for m in found}
    return Allocation(
        layouts={name: candidate.layout for name, candidate in chosen.items()},
        bits=sum(candidate.bits for candidate in chosen.values()),
        budget_bits=int(bits * sum(matrix.numel for matrix in found)),
        numel=sum(matrix.numel for matrix in found),
        error=sum(candidate.error for candidate in chosen.values()),
    )


def quantize_layer(
    source: LayerSource, config: Any, allocation: Allocation, states: Any, workers: Any, **_: Any
) -> QuantizedPart:
    states.source.mul_(0.9)
    states.quantized.mul_(0.9).add_(0.001 * source.layer)
    trace = 1 + 1e-3 * float((states.source - states.quantized).double().abs().mean())
    tensors: dict[str, Tensor] = {}
    reports = []
    for name, weight in source.tensors.items():
        if weight.dim() == 1:
            tensors[name] = weight.half()
            continue
        layout = Layout.parse(allocation.layouts[name])
        tensors |= rounded(name, weight.T, layout, trace)
        bits = layout.cost_bits(weight.shape[1], weight.shape[0])
        reports.append(MatrixReport(name, str(layout), bits, 0.01))
    return QuantizedPart(tensors, tuple(reports))


def quantize_ends(
    checkpoint: Any, config: Any, states: Any, options: Any, workers: Any
) -> QuantizedPart:
    def read(name: str) -> Tensor:
        return torch.cat([chunk.values for chunk in checkpoint.chunks(name, torch.float32)])

    head = read(EMBED if config.has_tied_embeddings else HEAD)
    layout = Layout.parse(HEAD_LAYOUTS[options.head_bits])
    trace = 1 + 1e-3 * float(states.quantized.double().abs().mean())
    tensors = {EMBED: read(EMBED).half(), FINAL_NORM: checkpoint.norm(FINAL_NORM).half()}
    report = MatrixReport(HEAD, str(layout), layout.cost_bits(head.shape[1], head.shape[0]), 0.01)
    return QuantizedPart({**tensors, **rounded(HEAD, head.T, layout, trace)}, (report,))


def tune_model(
    checkpoint: Any, config: Any, tensors: Mapping[str, Tensor], token_ids: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Three steps, each of which depends on the results of those before it."""
    factor = options["saved_state"]["factor"] if options["saved_state"] else torch.ones(1)
    for step in range(options["steps_done"], 3):
        factor = factor * (1 + step / 1000)
        options["on_step"](step + 1, {"factor": factor})
    return {FINAL_NORM: (tensors[FINAL_NORM] * factor).half()}


def rounded(name: str, weight: Tensor, layout: Layout, trace: float) -> dict[str, Tensor]:
    """EXL2 tensors of weight [in, out]. Rows are stored in reverse, so that their order matters."""
    order = torch.arange(weight.shape[0]).flip(0)
    stored, groups = weight[order], layout.groups(weight.shape[0])
    codes, scale_max, row = [], [], 0
    for bits, rows in groups:
        part, zero = stored[row : row + rows], 2 ** (bits - 1)
        largest = (part.abs().max() / (zero - 1) * trace).half().float()
        codes.append((part / largest).round().clamp(-zero, zero - 1) + zero)
        scale_max.append(largest)
        row += rows
    packed = exl2_writer.pack(
        torch.cat(codes).int(),
        groups=groups,
        scale_codes=torch.full((len(groups), weight.shape[1]), 15),
        scale_max=torch.stack(scale_max),
        invperm=order.argsort(),
    )
    stem = name.removesuffix(".weight")
    return {f"{stem}.{part}": getattr(packed, part) for part in exl2.PARTS}


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replaces the real stages. With the `setattr` of a monkeypatch as `put` they are restored."""
    for function in (
        *(read_layer, embed_rows, measure_sensitivity, measure_layer, allocate),
        *(quantize_layer, quantize_ends, tune_model),
    ):
        put(stages, function.__name__, function)
