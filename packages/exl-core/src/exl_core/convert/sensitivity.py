"""Sensitivity of the loss to errors in each output of each matrix, from gradients of the source.

The labels are sampled from the source's own predictions, one token per position. The gradients of
their loss say how much a change of an output changes the predictions (Fisher information). An error
E of a matrix is expected to increase the loss by half the sum over outputs n of
mean(g_n^2) * E_n' H E_n.

For EXL3, which lets the errors of outputs make up for each other (`ldlq.py`), also mean(g_n g_m) is
measured for outputs n and m of some matrices, in the same block of 128.

The mean is over all tokens. The outputs of an expert for a token that did not choose it have no
effect, so their gradients are 0: an expert counts by how often it is used, and with which weights.

Gradients are computed from the last layer to the first, with one layer in memory at a time. States
between layers are kept in files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from exl_core.arch.modules import ModuleRow, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.convert.layers import (
    LayerSource,
    compute_type,
    embed_rows,
    in_file_order,
    read_final_norm,
    read_layer,
    read_tensor,
)
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import LayerFunction, final_states
from exl_core.convert.plan import ConvertOptions
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl3.matrix import stored_size
from exl_core.formats.containers.safetensors_writer import as_bytes
from exl_core.ops.weights import HADAMARD

Sensitivity = Mapping[str, Tensor]
"""Mean square of each output's gradient, in nats^2: float32 [out], by the matrix's name. For EXL3
also, by `outputs_name`, the mean products of the gradients of two outputs: float32
[blocks, 128, 128], with the outputs in the order of the file. Can be stored in a safetensors
file."""

ROWS = 8
"""Calibration rows in use. Few are enough, because each token has a gradient for every output of
every matrix."""

PRIOR_ROWS = 8
"""Number of tokens that are added to each expert's own. Their squared gradients are the mean over
the layer's experts. An expert that no calibration row uses thus has a sensitivity above 0."""

HEAD_ROWS = 256  # positions whose logits are in memory at a time


def measure_sensitivity(
    checkpoint: Checkpoint,
    config: ModelConfig,
    token_ids: Tensor,
    *,
    options: ConvertOptions,
    workers: Workers,
    on_layer: Callable[[int, int], None] | None = None,
    scratch: Path | None = None,
) -> Sensitivity:
    """Measures the sensitivity on the first `ROWS` rows of token_ids int64 [rows, length].

    States are kept in `scratch`, with 2 bytes for each of ROWS * length * hidden * layers values.
    `on_layer` is called with the number of layers done and the total, which counts each layer twice
    (forward and backward).
    """
    device = torch.device(options.device)
    total = 2 * config.num_layers
    sensitivity: dict[str, Tensor] = {}
    token_ids = token_ids[:ROWS]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        states = embed_rows(checkpoint, config, token_ids)
        for layer in range(config.num_layers):
            _save(states, Path(folder, str(layer)))
            source = read_layer(checkpoint, config, layer, device)
            _forward(source, config, states, workers)
            if on_layer is not None:
                on_layer(layer + 1, total)
        gradient = _head_gradient(checkpoint, config, states, options, workers)
        for layer in reversed(range(config.num_layers)):
            source = read_layer(checkpoint, config, layer, device)
            states = _load(Path(folder, str(layer)), states.shape)
            is_paired = options.format == "exl3"
            sensitivity |= _backward(source, config, states, gradient, workers, is_paired=is_paired)
            if on_layer is not None:
                on_layer(total - layer, total)
    return sensitivity


def _forward(source: LayerSource, config: ModelConfig, states: Tensor, workers: Workers) -> None:
    layer = LayerFunction(config, source.layer, source.vectors(), source.products())

    def run(row: int) -> None:
        x = states[row : row + 1].to(source.device)
        states[row : row + 1] = layer(x).cpu()

    with torch.no_grad():
        workers.map(run, range(len(states)))


def _head_gradient(
    checkpoint: Checkpoint,
    config: ModelConfig,
    states: Tensor,
    options: ConvertOptions,
    workers: Workers,
) -> Tensor:
    """Gradient of the summed loss of sampled tokens, with respect to the last layer's states."""
    device = torch.device(options.device)
    table = module_table(config)
    norm = {role: x.to(device) for role, x in read_final_norm(checkpoint, config).items()}
    head_row = table.embed if table.is_tied else table.head
    head = read_tensor(checkpoint, head_row.name).to(device)
    head = head.to(compute_type(device))
    gradient = torch.empty_like(states)

    def run(row: int) -> None:
        generator = torch.Generator().manual_seed(options.seed + row)
        for first in range(0, states.shape[1], HEAD_ROWS):
            workers.check()
            span = slice(first, first + HEAD_ROWS)
            x = states[row, span].to(device).requires_grad_()
            logits = linear(final_states(config, norm, x).to(head.dtype), head).float()
            if config.final_softcap is not None:
                logits = torch.tanh(logits / config.final_softcap) * config.final_softcap
            log_p = logits.log_softmax(-1)
            # Inverse transform sampling: one uniform number per position selects the first token
            # whose cumulative probability reaches it. The float64 sums need not end at exactly 1,
            # so the number is scaled by the last sum.
            draws = torch.rand(len(x), 1, generator=generator, dtype=torch.float64).to(device)
            sums = log_p.detach().double().exp().cumsum(-1)
            sampled = torch.searchsorted(sums, draws * sums[:, -1:]).clamp(max=log_p.shape[1] - 1)
            loss = -log_p.gather(1, sampled).sum()
            (state_gradient,) = torch.autograd.grad(loss, x)
            gradient[row, span] = state_gradient.cpu()

    workers.map(run, range(len(states)))
    return gradient


def outputs_name(name: str) -> str:
    """Name of the products of gradients of a matrix's outputs."""
    return f"{name}.outputs"


def has_products(row: ModuleRow) -> bool:
    """Whether products of gradients of a matrix's outputs are measured for EXL3. Those of gate and
    up gain nothing from them. Experts see too few tokens."""
    is_of_layer = row.is_converted and row.layer is not None and row.expert is None
    return is_of_layer and row.packed not in ("gate_up", "shared_gate_up")


def sensitivity_bytes(config: ModelConfig) -> int:
    """Bytes of the products of gradients of all matrices of EXL3. The rest takes little."""
    sizes = [row.shape[0] for row in module_table(config).rows if has_products(row)]
    return sum(4 * HADAMARD * stored_size(size) for size in sizes)


def _backward(
    source: LayerSource,
    config: ModelConfig,
    states: Tensor,
    gradient: Tensor,
    workers: Workers,
    *,
    is_paired: bool,
) -> dict[str, Tensor]:
    """Sensitivity of the layer's matrices, with products of gradients if `is_paired`.

    `gradient` is the gradient with respect to the layer's outputs. It is replaced by the gradient
    with respect to its inputs, `states`.
    """
    vectors, product, keys = source.vectors(), source.products(), source.matrix_keys
    paired = [key for key in keys if is_paired and has_products(source.rows[key])]

    def run(row: int) -> tuple[dict[str, _Squares], dict[str, Tensor]]:
        outputs: dict[str, Tensor] = {}

        def recorded(key: str, x: Tensor) -> Tensor:
            outputs[key] = product(key, x)
            return outputs[key]

        x = states[row : row + 1].to(source.device).requires_grad_()
        y = LayerFunction(config, source.layer, vectors, recorded)(x)
        used = [key for key in keys if key in outputs]  # no token may have chosen an expert
        operands = [x, *(outputs[key] for key in used)]
        y_gradient = gradient[row : row + 1].to(source.device)
        x_gradient, *output_gradients = torch.autograd.grad(y, operands, y_gradient)
        # Before `gradient` is overwritten: an output's gradient may be `y_gradient` itself, which
        # on a CPU is a view of `gradient`.
        flat = [g.float().flatten(0, -2) for g in output_gradients]  # [tokens, out] each
        squares = [_Squares(g.square().sum(0).cpu(), len(g)) for g in flat]
        pairs = {
            key: _block_products(in_file_order(source.rows[key], g.T)).cpu()
            for key, g in zip(used, flat, strict=True)
            if key in paired
        }
        gradient[row : row + 1] = x_gradient.to(gradient.device)
        return dict(zip(used, squares, strict=True)), pairs

    rows, pairs = zip(*workers.map(run, range(len(states))), strict=True)
    unused = {key: _Squares(torch.zeros(len(source.matrix(key))), 0) for key in keys}
    squares = {key: _sum(row.get(key, unused[key]) for row in rows) for key in keys}
    tokens = states.shape[0] * states.shape[1]
    found = {source.rows[key].name: x / tokens for key, x in _with_prior(source, squares).items()}
    for key in paired:
        total = torch.stack([row[key] for row in pairs]).sum(0)
        found[outputs_name(source.rows[key].name)] = total / tokens
    return found


def _block_products(gradients: Tensor) -> Tensor:
    """Sums over tokens of products of gradients [out, tokens] in each block: [blocks, 128, 128]."""
    padding = stored_size(len(gradients)) - len(gradients)
    blocks = pad(gradients, (0, 0, 0, padding)).view(-1, HADAMARD, gradients.shape[1])
    return blocks @ blocks.mT


class _Squares(NamedTuple):
    """Sum of the squares of a matrix's output gradients over some tokens: float32 [out]."""

    total: Tensor
    tokens: int


def _sum(squares: Iterable[_Squares]) -> _Squares:
    totals, counts = zip(*squares, strict=True)
    return _Squares(torch.stack(totals).sum(0), sum(counts))


def _with_prior(source: LayerSource, squares: Mapping[str, _Squares]) -> dict[str, Tensor]:
    """Sums of squares by key, with `PRIOR_ROWS` more for each expert."""
    rows = source.rows
    experts = [key for key in squares if rows[key].expert is not None]
    pooled = {
        role: _sum(squares[key] for key in experts if rows[key].role == role)
        for role in {rows[key].role for key in experts}
    }
    added = {role: PRIOR_ROWS * one.total / one.tokens for role, one in pooled.items()}
    return {
        key: one.total if rows[key].expert is None else one.total + added[rows[key].role]
        for key, one in squares.items()
    }


def _save(states: Tensor, path: Path) -> None:
    path.write_bytes(as_bytes(states.to(torch.bfloat16)))


def _load(path: Path, shape: torch.Size) -> Tensor:
    values = torch.from_numpy(np.fromfile(path, dtype=np.int16))
    return values.view(torch.bfloat16).view(shape).float()
