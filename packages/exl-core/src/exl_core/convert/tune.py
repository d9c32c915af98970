"""End-to-end tuning of norms and scales of matrices against the source's predictions.

Norms are stored in float16. In EXL2, each group of a matrix has a float16 number that all its
scales are multiples of. In EXL3, each input and each output of a matrix has a scale. Tuning finds a
factor for each of these values by gradient descent (Adam) on the divergence of the quantized
model's predictions from the source's, on the calibration rows. Codes, biases and the numbers of a
layer do not change.

The steps are noisy, and the best size of a step grows with the distance from the source. Therefore
the learning rate follows from the model's divergence before the first step. Rows that no step sees
measure it, and decide at the end how far the values go from where they were to where the last step
left them.

Each step runs forward and backward through the layers with one layer in memory. Weights (in
`compute_type`) and the states before each layer are kept in files. The backward pass computes each
layer once more. On a GPU, weights and states stay in GPU memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from exl_core.arch.layers import Mixer, inner_width
from exl_core.arch.modules import Kind, ModuleRow, ModuleTable, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.convert.layers import (
    Vectors,
    as_factor,
    bias_role,
    compute_type,
    embed_rows,
    in_model_order,
    is_kept,
    product_of,
    product_type,
    read_final_norm,
    read_layer,
    read_tensor,
    stored_vector,
)
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import CapturingPass, LayerFunction, final_states
from exl_core.convert.plan import ConvertOptions
from exl_core.convert.sensitivity import HEAD_ROWS
from exl_core.convert.target import target_of
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.containers.mapped import MappedFile
from exl_core.formats.containers.safetensors_writer import as_bytes

STEPS = 48
ROWS_PER_STEP = 4
LENGTH = 512
LEARNING_RATE = 0.006
"""Largest learning rate for a model whose divergence is 1 nat per token before the first step.

That of others is proportional to the root of the divergence: about to the error of the weights."""
HELD_OUT = 16  # most rows that measure the model apart from the steps
SHARES = (0.5, 1.0)  # that are measured; a parabola through them and 0 has the best one
RECURRENT_VALUES = 24
"""Values that the backward pass through a recurrent layer keeps of a token, for each channel of its
convolution: its inputs and outputs, those of the chunks, and the heads' decays within a chunk."""
_MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's moments of each parameter, by torch's names

LoadTensor = Callable[[], Tensor]
"""Returns an offloaded tensor."""

OnStep = Callable[[int, Mapping[str, Tensor]], None]
"""Called with the number of steps done and the state from which tuning can resume."""


def tune_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    token_ids: Tensor,
    *,
    options: ConvertOptions,
    workers: Workers,
    scratch: Path,
    steps_done: int = 0,
    saved_state: Mapping[str, Tensor] | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Tensor]:
    """New values of norms and of `q_scale_max`, or of `suh` and `svh`, with unchanged shapes and
    types; none with `fast`.

    `tensors` are all tensors of the output, by name. The model must satisfy `fits_in_memory`.
    Offloaded tensors take `scratch_bytes` in `scratch`. To resume after `steps_done` steps of an
    earlier call, `saved_state` is the state that `on_step` received after them.
    """
    device = torch.device(options.device)
    if options.fast:
        return {}
    length = min(LENGTH, token_ids.shape[1])
    whole = token_ids[:, : token_ids.shape[1] // length * length]
    pieces = whole.reshape(len(token_ids), -1, length)
    # Every piece begins as its row does: often with BOS, without which some models are lost.
    pieces = torch.cat([token_ids[:, None, :1].expand_as(pieces[..., :1]), pieces[..., 1:]], 2)
    token_ids = pieces.flatten(0, 1)[: STEPS * ROWS_PER_STEP + HELD_OUT]
    with torch.no_grad():
        source_states = _source_states(checkpoint, config, token_ids, device, workers)
        model = _TunedModel.of(checkpoint, config, tensors, scratch, options)
    seen = len(token_ids) - min(HELD_OUT, len(token_ids) // 4)
    measured = slice(seen if seen < len(token_ids) else 0, None)  # all of fewer than four rows
    held_out = token_ids[measured], source_states[measured], workers
    untuned = model.mean_divergence(*held_out)
    largest_rate = LEARNING_RATE * math.sqrt(max(0.0, untuned))
    order = torch.randperm(seen, generator=torch.Generator().manual_seed(options.seed))
    parameters = model.parameters
    adam = torch.optim.Adam(parameters.values(), lr=largest_rate, betas=(0.9, 0.95))
    if saved_state:
        _restore(adam, parameters, steps_done, saved_state)
    for step in range(steps_done, STEPS):
        progress = (step + 1) / STEPS
        adam.param_groups[0]["lr"] = (
            largest_rate * min(1.0, progress * 8) * (1 + math.cos(math.pi * progress)) / 2
        )
        rows = [int(order[(step * ROWS_PER_STEP + i) % len(order)]) for i in range(ROWS_PER_STEP)]
        for name, gradient in model.gradients(
            token_ids[rows], source_states[rows], workers
        ).items():
            parameters[name].grad = gradient
        adam.step()
        if on_step is not None:
            on_step(step + 1, _optimizer_state(adam, parameters))
    model.keep_best_share(*held_out, untuned=untuned)
    return model.stored(tensors)


def _optimizer_state(adam: torch.optim.Adam, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # These keys are part of the work directory's format.
    state = {f"{name} parameter": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state |= {f"{name} {moment}": adam.state[parameter][moment] for moment in _MOMENTS}
    return state


def _restore(
    adam: torch.optim.Adam,
    parameters: Mapping[str, Tensor],
    step: int,
    saved_state: Mapping[str, Tensor],
) -> None:
    for name, parameter in parameters.items():
        parameter.data.copy_(saved_state[f"{name} parameter"])
        moments = {
            moment: saved_state[f"{name} {moment}"].to(parameter.device) for moment in _MOMENTS
        }
        adam.state[parameter] = {"step": torch.tensor(float(step)), **moments}


def scratch_bytes(config: ModelConfig, device: torch.device) -> int:
    """Bytes of the offloaded tensors: weights in the device's compute type, states in float32."""
    head = compute_type(device).itemsize * config.vocab_size * config.hidden_size
    weights = sum(
        product_type(row, device).itemsize * math.prod(row.shape)
        for row in module_table(config).rows
        if row.is_converted and row.layer is not None
    )
    states = config.num_layers * ROWS_PER_STEP * LENGTH * config.hidden_size
    return head + weights + 4 * states


def fits_in_memory(config: ModelConfig, device: torch.device) -> bool:
    """Whether the offloaded tensors and the values of one layer fit into half of the free memory.

    As files, the tensors take no memory that another process needs. But each step is only fast if
    they are in the page cache.
    """
    widest = max(
        6 * inner_width(layer) + RECURRENT_VALUES * _channels(layer.mixer)
        for layer in config.layers
    )
    values = LENGTH * (16 * config.hidden_size + widest)
    head = compute_type(device).itemsize * config.vocab_size * config.hidden_size
    kept = sum(
        product_type(row, device).itemsize * math.prod(row.shape)
        for row in module_table(config).rows
        if row.layer is not None and is_kept(row)
    )
    needed = scratch_bytes(config, device) + head + kept + 4 * ROWS_PER_STEP * values
    free = free_memory_bytes(device)
    return free is not None and needed < free // 2


def _channels(mixer: Mixer) -> int:
    """Width of the convolution of a recurrent layer; 0 for other layers."""
    state = mixer.state_shape
    return 0 if state is None else state.inputs[1]


def _source_states(
    checkpoint: Checkpoint,
    config: ModelConfig,
    token_ids: Tensor,
    device: torch.device,
    workers: Workers,
) -> Tensor:
    """Inputs of the source's head, [rows, length, hidden] in the compute type."""
    states = embed_rows(checkpoint, config, token_ids)
    for layer in range(config.num_layers):
        source = read_layer(checkpoint, config, layer, device)
        run = LayerFunction(config, layer, source.vectors(), source.products())
        CapturingPass(run, states, device, workers).to_end()
    norm = read_final_norm(checkpoint, config)
    rows = range(len(states))
    normed = workers.map(lambda row: final_states(config, norm, states[row]), rows)
    return torch.stack([x.to(compute_type(device)) for x in normed])


def _offload(tensor: Tensor, path: Path) -> LoadTensor:
    """Writes a CPU tensor to a file, whose pages are in memory only while the tensor is in use. A
    GPU tensor stays in GPU memory."""
    if tensor.is_cuda:
        return lambda: tensor
    path.write_bytes(as_bytes(tensor))
    shape, dtype, size = tensor.shape, tensor.dtype, tensor.nbytes
    return lambda: MappedFile(path).view(0, size, dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """`weight` loads [out, in] as dequantized. `in_factors` names the parameter that scales the
    inputs, and `groups` int64 [in] is the element of it for each feature. `out_factors` is the one
    that scales the outputs, in the order of the file. A matrix may lack either."""

    weight: LoadTensor
    groups: Tensor | None = None
    in_factors: str | None = None
    out_factors: str | None = None

    @property
    def parameters(self) -> list[str]:
        """Names of its parameters."""
        return [name for name in (self.in_factors, self.out_factors) if name is not None]


@dataclass(slots=True)
class _TunedModel:
    """The quantized model, with a parameter for each tuned tensor: the logarithms of its factors.

    `parameters` are by tensor name. A norm's parameter has the length of the norm, that of a
    `q_scale_max` has one number per group, those of `suh` and `svh` have one for each feature
    without padding. `constants` are biases, numbers and routers by tensor
    name.
    """

    config: ModelConfig
    table: ModuleTable
    device: torch.device
    scratch: Path
    embed: Tensor
    source_head: Tensor
    repeats_norms: bool
    norms: dict[str, Tensor] = field(default_factory=dict)
    matrices: dict[str, _Matrix] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        scratch: Path,
        options: ConvertOptions,
    ) -> _TunedModel:
        device = torch.device(options.device)
        dtype = compute_type(device)
        table = module_table(config)
        head = read_tensor(checkpoint, (table.embed if table.is_tied else table.head).name)
        embed = tensors[table.embed.name]
        repeats_norms = target_of(options).repeats_norms
        model = cls(config, table, device, scratch, embed, head.to(device, dtype), repeats_norms)
        parameters = model.parameters
        for name in tensors:
            if name in table and table[name].is_norm:
                model.norms[name] = as_factor(table[name], tensors[name]).to(device)
                parameters[name] = torch.zeros_like(model.norms[name])
            elif name.endswith((".q_scale_max", ".trellis")):
                model._add_matrix(name.rpartition(".")[0], tensors)
            elif name == table.head.name:  # not quantized
                load_weight = _offload(tensors[name].to(device, dtype), scratch / table.head.stem)
                model.matrices[table.head.stem] = _Matrix(load_weight)
            elif name in table and (not table[name].is_matrix or is_kept(table[name])):
                row = table[name]
                values = in_model_order(row, tensors[name][: row.shape[0]])
                dtype = product_type(row, device) if row.is_matrix else torch.float32
                model.constants[name] = values.to(device, dtype)
        for parameter in parameters.values():
            parameter.requires_grad_()
        return model

    def _add_matrix(self, stem: str, tensors: Mapping[str, Tensor]) -> None:
        """Adds a quantized matrix and its parameters."""
        row, device = self.table[f"{stem}.weight"], self.device
        dtype = product_type(row, device)
        features = torch.arange(row.shape[1])
        if f"{stem}.trellis" in tensors:
            parts = {p: tensors[f"{stem}.{p}"] for p in exl3.PARTS if f"{stem}.{p}" in tensors}
            layer = exl3.check(parts, stem).to(device)
            dense = exl3.dequantize(layer, 0, layer.out_features)[: row.shape[1]]
            factors = {f"{stem}.suh": row.shape[1], f"{stem}.svh": row.shape[0]}
            if row.kind is Kind.HEAD:  # `_divergence` has no factors of outputs
                del factors[f"{stem}.svh"]
        else:
            packed = exl2.check({p: tensors[f"{stem}.{p}"] for p in exl2.PARTS}, stem)
            dense = exl2.dequantize(packed)
            sizes = torch.tensor([group.rows for group in packed.groups])
            features = torch.arange(len(sizes)).repeat_interleave(sizes)[packed.q_invperm.long()]
            factors = {f"{stem}.q_scale_max": len(sizes)}
        stored = dense.T[: row.shape[0]]
        weight = in_model_order(row, stored).to(device, dtype).contiguous()
        load_weight = _offload(weight, self.scratch / stem)
        self.matrices[stem] = _Matrix(load_weight, features.to(device), *factors)
        for name, size in factors.items():
            self.parameters[name] = torch.zeros(size, device=device)

    def divergence(self, token_ids: Tensor, source_states: Tensor, workers: Workers) -> float:
        """Mean divergence over token_ids [R, T], whose source states are `source_states`."""
        states, _ = self._forward(token_ids, workers)
        return self._head_backward(states, source_states, workers)[0]

    def mean_divergence(self, token_ids: Tensor, source_states: Tensor, workers: Workers) -> float:
        """`divergence` of any number of rows, of which `ROWS_PER_STEP` are in memory at a time."""
        firsts = range(0, len(token_ids), ROWS_PER_STEP)
        parts = [slice(first, first + ROWS_PER_STEP) for first in firsts]
        found = [self.divergence(token_ids[one], source_states[one], workers) for one in parts]
        return float(np.average(found, weights=[len(token_ids[one]) for one in parts]))

    def keep_best_share(
        self, token_ids: Tensor, source_states: Tensor, workers: Workers, *, untuned: float
    ) -> None:
        """Multiplies all parameters by a share in 0 to 1: the one with the least divergence of 0,
        `SHARES` and the least place of the parabola through theirs.

        `untuned`: the divergence at the share 0, with which the steps began.
        """
        whole = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

        def take(share: float) -> None:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(whole[name] * share)

        def loss_of(share: float) -> float:
            take(share)
            return self.mean_divergence(token_ids, source_states, workers)

        losses = {0.0: untuned} | {share: loss_of(share) for share in SHARES}
        # The divergence of a long step is no parabola, whose least place may then be a bad one.
        least = least_of_parabola(*losses.values())
        if least not in losses:
            losses[least] = loss_of(least)
        take(min(losses, key=losses.__getitem__))

    def gradients(
        self, token_ids: Tensor, source_states: Tensor, workers: Workers
    ) -> dict[str, Tensor]:
        """Gradient of that divergence with respect to each parameter."""
        states, before = self._forward(token_ids, workers)
        _, state_gradient, gradients = self._head_backward(states, source_states, workers)
        for layer in reversed(range(self.config.num_layers)):
            state_gradient, parameter_gradients = self._layer_backward(
                layer, before.pop()(), state_gradient, workers
            )
            gradients |= parameter_gradients
        return gradients

    @torch.no_grad()
    def _forward(self, token_ids: Tensor, workers: Workers) -> tuple[Tensor, list[LoadTensor]]:
        """States after the last layer, float32 [R, T, hidden], and those before each."""
        x = self.embed[token_ids].float().to(self.device)
        x = x * self.config.embed_factor
        before: list[LoadTensor] = []
        for layer in range(self.config.num_layers):
            before.append(_offload(x, self.scratch / f"states-{layer}"))
            run = self._layer_function(layer)
            x = torch.cat(workers.map(run, _pieces(x, workers)))
        return x, before

    def _head_backward(
        self, states: Tensor, source_states: Tensor, workers: Workers
    ) -> tuple[float, Tensor, dict[str, Tensor]]:
        """Divergence, its gradient by `states`, and those by the parameters of norm and head."""
        norm_name, head_stem = self.table.final_norm.name, self.table.head.stem
        names = [norm_name, *self.matrices[head_stem].parameters]
        head = self.matrices[head_stem].weight()

        def run(piece: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
            x, target = piece[0].detach().requires_grad_(), piece[1].flatten(0, 1).to(self.device)
            normed = final_states(self.config, self._vectors([self.table.final_norm]), x)
            inputs = self._scale_inputs(head_stem, normed).to(head.dtype)
            loss, input_gradient = self._divergence(
                inputs.detach().flatten(0, 1), head, target, workers
            )
            return loss, self._backward(inputs.flatten(0, 1), x, names, input_gradient)

        pieces = zip(_pieces(states, workers), _pieces(source_states, workers), strict=True)
        results = workers.map(run, pieces)
        state_gradient, parameter_gradients = _merge_gradients(
            [grads for _, grads in results], names
        )
        return sum(loss for loss, _ in results) / len(results), state_gradient, parameter_gradients

    def _layer_backward(
        self, layer: int, states: Tensor, state_gradient: Tensor, workers: Workers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients with respect to the states before the layer and to its parameters.

        `states` are those before the layer, `state_gradient` is with respect to those after it.
        """
        of_layer = self.table.weights_of(layer).values()
        own = {row.name for row in of_layer}
        for row in of_layer:
            own |= set(self.matrices[row.stem].parameters if row.stem in self.matrices else ())
        names = [name for name in self.parameters if name in own]
        run_layer = self._layer_function(layer)

        def run(piece: tuple[Tensor, Tensor]) -> list[Tensor]:
            x = piece[0].detach().requires_grad_()
            return self._backward(run_layer(x), x, names, piece[1])

        pieces = zip(_pieces(states, workers), _pieces(state_gradient, workers), strict=True)
        return _merge_gradients(workers.map(run, pieces), names)

    def _backward(self, y: Tensor, x: Tensor, names: list[str], y_gradient: Tensor) -> list[Tensor]:
        operands = [x, *(self.parameters[name] for name in names)]
        # Tensors of an expert that no token of this piece chose are not used.
        found = torch.autograd.grad(y, operands, y_gradient, allow_unused=True)
        return [
            torch.zeros_like(operand) if gradient is None else gradient
            for gradient, operand in zip(found, operands, strict=True)
        ]

    def _layer_function(self, layer: int) -> Callable[[Tensor], Tensor]:
        """The layer as a function. Its weights are in memory as long as the function exists."""
        rows = self.table.weights_of(layer)
        stems = {key: row.stem for key, row in rows.items() if row.is_converted}
        weights = {key: self.matrices[stem].weight() for key, stem in stems.items()}
        weights |= {key: self.constants[row.name] for key, row in rows.items() if is_kept(row)}

        def bias(key: str) -> Tensor | None:
            name = rows[key].bias
            return None if name is None else self.constants[name]

        multiply = product_of(weights, bias)
        multiply_only = product_of(weights, lambda _: None)

        def product(key: str, x: Tensor) -> Tensor:
            if key not in stems:
                return multiply(key, x)
            stem = stems[key]
            x = self._scale_inputs(stem, x)
            if self.matrices[stem].out_factors is None:
                return multiply(key, x)
            y, added = self._scale_outputs(stem, multiply_only(key, x)), bias(key)
            return y if added is None else y + added.to(y)

        def run(x: Tensor) -> Tensor:
            return LayerFunction(self.config, layer, self._vectors(rows.values()), product)(x)

        return run

    def _vectors(self, rows: Iterable[ModuleRow]) -> Vectors:
        """Vectors among these rows, norms times their parameters."""
        found: dict[str, Tensor] = {}
        for row in rows:
            if row.is_norm:
                found[row.role] = self.norms[row.name] * self.parameters[row.name].exp()
            elif not row.is_matrix:
                found[row.role] = self.constants[row.name]
            if row.bias is not None and row.packed is None:
                found[bias_role(row.role)] = self.constants[row.bias]
        return found

    def _scale_inputs(self, stem: str, x: Tensor) -> Tensor:
        """Inputs of a matrix times the factors of their groups, which equals scaling its rows."""
        matrix = self.matrices[stem]
        if matrix.in_factors is None or matrix.groups is None:
            return x
        return x * self.parameters[matrix.in_factors].exp()[matrix.groups]

    def _scale_outputs(self, stem: str, y: Tensor) -> Tensor:
        """Outputs of a matrix without its bias, times their factors."""
        name, row = self.matrices[stem].out_factors, self.table[f"{stem}.weight"]
        return y if name is None else y * in_model_order(row, self.parameters[name]).exp().to(y)

    def _softcap(self, logits: Tensor) -> Tensor:
        softcap = self.config.final_softcap
        return logits.float() if softcap is None else torch.tanh(logits.float() / softcap) * softcap

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tuned tensors, multiplied by their factors, in the form of the output."""
        stored = {}
        for name, parameter in self.parameters.items():
            factor = parameter.detach().exp()
            if name in self.norms:
                norm, repeats = self.norms[name] * factor, self.repeats_norms
                stored[name] = stored_vector(self.table[name], norm, repeats_norms=repeats).cpu()
            else:
                padding = (0, len(tensors[name]) - len(factor))
                factor = pad(factor.cpu(), padding, value=1.0)
                stored[name] = (tensors[name].float() * factor).half()
        return stored

    @torch.no_grad()
    def _divergence(
        self, x: Tensor, head: Tensor, source_states: Tensor, workers: Workers
    ) -> tuple[float, Tensor]:
        """Mean divergence and its gradient with respect to x.

        x [T, hidden] are the inputs of the quantized head, `source_states` those of the source's.
        """
        total, parts = 0.0, []
        for first in range(0, len(x), HEAD_ROWS):
            workers.check()
            rows = slice(first, first + HEAD_ROWS)
            prediction = self._softcap(linear(x[rows], head)).log_softmax(-1)
            target = self._softcap(linear(source_states[rows], self.source_head)).log_softmax(-1)
            p = target.exp()
            total += float((p * (target - prediction)).sum(dtype=torch.float64))
            gradient = prediction.exp().sub_(p).div_(len(x))
            if self.config.final_softcap is not None:
                capped = self._softcap(linear(x[rows], head))
                gradient *= 1 - (capped / self.config.final_softcap).square()
            parts.append(gradient.to(head.dtype) @ head)
        return total / len(x), torch.cat(parts)


def least_of_parabola(start: float, middle: float, end: float) -> float:
    """Place in 0 to 1 of the least value of a parabola with these values at 0, 0.5 and 1."""
    curvature = start - 2 * middle + end
    if curvature <= 0:
        return 0.0 if start <= end else 1.0
    return float(min(max(0.5 + (start - end) / (4 * curvature), 0.0), 1.0))


def _pieces(x: Tensor, workers: Workers) -> tuple[Tensor, ...]:
    return torch.split(x, min(workers.rows_per_piece, ROWS_PER_STEP))


def _merge_gradients(
    pieces: list[list[Tensor]], names: list[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Joins gradients of pieces: concatenates those of states, averages those of parameters."""
    state_gradients, *parameter_gradients = zip(*pieces, strict=True)
    means = [torch.stack(one).mean(0) for one in parameter_gradients]
    return torch.cat(state_gradients), dict(zip(names, means, strict=True))
