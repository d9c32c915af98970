"""Sensitivity of the loss to errors in each output of each matrix, from gradients of the source.

The labels are sampled from the source's own predictions, one token per position. The gradients of
their loss say how much a change of an output changes the predictions (Fisher information). An error
E of a matrix is expected to increase the loss by half the mean over tokens of the sum over outputs
n of g_n^2 (E_n' x)^2, with the token's inputs x.

If all calibration rows begin with the same token, such as BOS, the square of a gradient is taken
apart into an output's sensitivity and a token's weight. Tokens differ by factors of a thousand, and
so do their inputs: all tokens attend to the first one, and few tokens have most of the energy of
the inputs of the last matrix of a layer. Otherwise gradients and inputs are taken as independent:
the mean of g_n^2 times E_n' H E_n. For single matrices of the models with such a token this would
be up to 100 times too large. Where rows begin with any tokens, the weights of the first ones are
too few to know, and independence is the better guess (docs/experiments/exl3-writer.md).

The outputs of an expert for a token that did not choose it have no effect, so their gradients are
0: an expert counts by how often it is used, and with which weights. Its tokens have equal weights.

For EXL3, the products of the gradients of two outputs are summed as well (`outputs.py`).

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
from torch.nn.functional import linear

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
from exl_core.convert.outputs import PairSums
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import LayerFunction, final_states
from exl_core.convert.plan import ConvertOptions
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.safetensors_writer import as_bytes


class MatrixSensitivity(NamedTuple):
    """Sensitivity of the loss to errors of one matrix.

    outputs  float32 [out]: mean square of each output's gradient over the tokens after the first
             one of each row, in nats^2; over all tokens, if `tokens` is empty
    tokens   float32 [rows, length]: weight of each token of the first calibration rows, with a mean
             of 1 over the tokens after the first one of each row. Empty, which means equal weights,
             for experts and if the rows begin with different tokens
    pairs    float16 [B, W, W]: correlations of the outputs (`PairSums.correlations`), in the order
             of the file. None: not known
    """

    outputs: Tensor
    tokens: Tensor
    pairs: Tensor | None = None

    @property
    def first(self) -> float:
        """Mean weight of the first tokens of the rows."""
        return float(self.tokens[:, 0].mean()) if len(self.tokens) else 1.0


Sensitivity = Mapping[str, MatrixSensitivity]
"""By the matrix's name."""

_PARTS = ("outputs", "tokens")  # ends of names in a file


def with_pairs(sensitivity: Sensitivity, pairs: Mapping[str, Tensor]) -> Sensitivity:
    """The same with the correlations of the outputs of some matrices, by name."""
    return {name: one._replace(pairs=pairs.get(name)) for name, one in sensitivity.items()}


def as_tensors(sensitivity: Sensitivity) -> dict[str, Tensor]:
    """Tensors for a safetensors file, without pairs."""
    return {
        f"{name} {part}": getattr(one, part) for name, one in sensitivity.items() for part in _PARTS
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, MatrixSensitivity]:
    """Inverse of `as_tensors`."""
    names = dict.fromkeys(name.rpartition(" ")[0] for name in tensors)
    return {
        name: MatrixSensitivity(*(tensors[f"{name} {part}"] for part in _PARTS)) for name in names
    }


ROWS = 8
"""Calibration rows in use. Few are enough, because each token has a gradient for every output of
every matrix."""

PAIR_ROWS = 32
"""The same where products of two gradients are summed, of which there are far more."""

PRIOR_ROWS = 8
"""Number of tokens that are added to each expert's own. Their squared gradients are the mean over
the layer's experts. An expert that no calibration row uses thus has a sensitivity above 0."""

ROWS_AT_ONCE = 8  # whose gradients are in memory
HEAD_ROWS = 256  # positions whose logits are in memory at a time


def has_common_start(token_ids: Tensor) -> bool:
    """Whether all rows begin with the same token, so that tokens have weights."""
    return bool((token_ids[:, 0] == token_ids[0, 0]).all())


def measure_sensitivity(
    checkpoint: Checkpoint,
    config: ModelConfig,
    token_ids: Tensor,
    *,
    options: ConvertOptions,
    workers: Workers,
    on_layer: Callable[[int, int], None] | None = None,
    on_pairs: Callable[[int, Mapping[str, Tensor]], None] | None = None,
    scratch: Path | None = None,
) -> Sensitivity:
    """Measures the sensitivity on the first `ROWS` rows of token_ids int64 [rows, length].

    States are kept in `scratch`, with 2 bytes for each of ROWS * length * hidden * layers values.
    `on_layer` is called with the number of layers done and the total, which counts each layer twice
    (forward and backward). `on_pairs` is called for each layer, the last one first, with the
    correlations of the outputs of its matrices (`PairSums.correlations`) by name. Then `PAIR_ROWS`
    rows are used.
    """
    device = torch.device(options.device)
    total = 2 * config.num_layers
    sensitivity: dict[str, MatrixSensitivity] = {}
    is_weighted = has_common_start(token_ids)
    token_ids = token_ids[: ROWS if on_pairs is None else PAIR_ROWS]
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
            sums = {} if on_pairs is None else _pair_sums(source, workers)
            squares = _backward(source, config, states, gradient, workers, pairs=sums)
            found = _sensitivities(source, squares, states, is_weighted=is_weighted)
            sensitivity |= found
            if on_pairs is not None:
                named = {source.rows[key].name: one for key, one in sums.items()}
                pairs = {name: one.correlations(found[name].outputs) for name, one in named.items()}
                on_pairs(layer, pairs)
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


def _backward(
    source: LayerSource,
    config: ModelConfig,
    states: Tensor,
    gradient: Tensor,
    workers: Workers,
    *,
    pairs: Mapping[str, PairSums],
) -> dict[str, _Squares]:
    """Sums over all rows for the layer's matrices by key. The sums of `pairs` get the gradients.

    `gradient` is the gradient with respect to the layer's outputs. It is replaced by the gradient
    with respect to its inputs, `states`.
    """
    vectors, product, keys = source.vectors(), source.products(), source.matrix_keys

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
        flat = {
            key: g.float().flatten(0, -2) for key, g in zip(used, output_gradients, strict=True)
        }  # [tokens, out] each
        squares = {key: _squares(source, key, g.square()) for key, g in flat.items()}
        after_first = {key: flat[key][1:].clone() for key in pairs if key in flat}
        gradient[row : row + 1] = x_gradient.to(gradient.device)
        return squares, after_first

    rows: list[dict[str, _Squares]] = []
    for first in range(0, len(states), ROWS_AT_ONCE):
        numbers = range(first, min(first + ROWS_AT_ONCE, len(states)))
        for squares, after_first in workers.map(run, numbers):
            rows.append(squares)
            for key, own in after_first.items():
                pairs[key].add(own)
    unused = {key: _Squares.unused(len(source.matrix(key))) for key in keys}
    return {key: _sum(row.get(key, unused[key]) for row in rows) for key in keys}


def has_pairs(row: ModuleRow) -> bool:
    """Whether the products of the gradients of two outputs of this matrix are summed. Those of
    experts, which few tokens choose, are not."""
    return row.is_converted and row.layer is not None and row.expert is None


def _pair_sums(source: LayerSource, workers: Workers) -> dict[str, PairSums]:
    """Empty sums for the matrices of a layer, by key."""
    rows = {key: source.rows[key] for key in source.matrix_keys}
    return {
        key: PairSums(in_file_order(row, torch.arange(row.shape[0])), source.device, workers)
        for key, row in rows.items()
        if has_pairs(row)
    }


class _Squares(NamedTuple):
    """Sums of the squares of a matrix's output gradients over some tokens.

    total    over all tokens, float32 [out]
    first    over the first tokens of the rows; of an expert: 0
    by_token over the outputs, times the size of their weights, [rows, length]; of an expert: [0, 0]
    """

    total: Tensor
    tokens: int
    first: Tensor
    by_token: Tensor

    @classmethod
    def unused(cls, outputs: int) -> _Squares:
        """Sums for an expert that no token has chosen."""
        return cls(torch.zeros(outputs), 0, torch.zeros(outputs), torch.zeros(0, 0))


def _squares(source: LayerSource, key: str, squares: Tensor) -> _Squares:
    """Sums for one row: `squares` [tokens, out]."""
    total = squares.sum(0).cpu()
    if source.rows[key].expert is not None:
        return _Squares.unused(len(total))._replace(total=total, tokens=len(squares))
    # Errors of an output are taken to be as large as its weights.
    by_token = squares @ source.matrix(key).square().mean(1)
    return _Squares(total, len(squares), squares[0].cpu(), by_token[None].cpu())


def _sum(squares: Iterable[_Squares]) -> _Squares:
    totals, counts, firsts, by_token = zip(*squares, strict=True)
    return _Squares(
        torch.stack(totals).sum(0), sum(counts), torch.stack(firsts).sum(0), torch.cat(by_token)
    )


def _sensitivities(
    source: LayerSource, squares: Mapping[str, _Squares], states: Tensor, *, is_weighted: bool
) -> dict[str, MatrixSensitivity]:
    """Sensitivity of the layer's matrices by name, from the sums over rows with these `states`."""
    tokens, totals = states.shape[0] * states.shape[1], _with_prior(source, squares)
    found = {}
    for key, one in squares.items():
        by_token, others = one.by_token, tokens - len(one.by_token)  # after the first tokens
        if is_weighted and len(by_token) and others:
            size = by_token[:, 1:].mean()
            weights = by_token / size if size > 0 else torch.ones_like(by_token)
            sensitivity = MatrixSensitivity((totals[key] - one.first) / others, weights)
        else:
            sensitivity = MatrixSensitivity(totals[key] / tokens, by_token[:0])
        found[source.rows[key].name] = sensitivity
    return found


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
