"""Tuning what the format leaves free, end to end, against the source's predictions.

Norms are stored in float16, and each group of a matrix has a float16 number that all its scales are
multiples of. A factor on each of them is found by gradient descent (Adam) on the divergence of the
quantized model's predictions from the source's, on the calibration rows. Codes stay as they are.

Each step goes up the layers and down again, with one of them in memory: weights (`compute_type`)
and the states before each layer wait in files, and on the way down a layer is computed once more.
On a GPU they wait on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from exl_core.arch.key_map import EMBED, FINAL_NORM, HEAD, layer_prefix
from exl_core.arch.spec import EmbedScale, ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.codecs import exl2
from exl_core.convert.block import MATRICES, Block, rms_norm
from exl_core.convert.layers import (
    as_factor,
    compute_type,
    embed_rows,
    read_layer,
    read_tensor,
    stored_norm,
)
from exl_core.convert.parallel import Workers
from exl_core.convert.plan import ConvertOptions
from exl_core.convert.sensitivity import HEAD_ROWS
from exl_core.convert.stream import Stream
from exl_core.weights.checkpoint import Checkpoint
from exl_core.weights.mapped import MappedFile
from exl_core.weights.safetensors_writer import as_bytes

STEPS = 48
ROWS_A_STEP = 4
LENGTH = 512
RATE = 0.005
_HEAD = HEAD.removesuffix(".weight")

_MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, of each knob

Kept = Callable[[], Tensor]
"""Gives a tensor that has been put aside."""

OnStep = Callable[[int, Mapping[str, Tensor]], None]
"""Called with steps done, and what to go on with."""


def tune_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    token_ids: Tensor,
    *,
    options: ConvertOptions,
    crew: Workers,
    scratch: Path,
    first: int = 0,
    held: Mapping[str, Tensor] | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Tensor]:
    """New values for some of `tensors` (all of the output, by name), of unchanged shapes and types:
    norms and `q_scale_max`. For models that `has_room` has room for; none with `fast`. What waits
    in files is in `scratch`: `scratch_bytes`. After `first` steps of an earlier call `held` is what
    it told of them."""
    device = torch.device(options.device)
    if options.fast:
        return {}
    length = min(LENGTH, token_ids.shape[1])
    token_ids = token_ids[:, : token_ids.shape[1] // length * length].reshape(-1, length)
    token_ids = token_ids[: STEPS * ROWS_A_STEP]
    with torch.no_grad():
        wanted = _source_states(checkpoint, config, token_ids, device, crew)
        model = _Tuned.of(checkpoint, config, tensors, scratch, device)
    order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(options.seed))
    knobs = model.knobs
    adam = torch.optim.Adam(knobs.values(), lr=RATE, betas=(0.9, 0.95))
    if held:
        _restore(adam, knobs, first, held)
    for step in range(first, STEPS):
        share = (step + 1) / STEPS
        adam.param_groups[0]["lr"] = (
            RATE * min(1.0, share * 8) * (1 + math.cos(math.pi * share)) / 2
        )
        rows = [int(order[(step * ROWS_A_STEP + i) % len(order)]) for i in range(ROWS_A_STEP)]
        for name, gradient in model.gradients(token_ids[rows], wanted[rows], crew).items():
            knobs[name].grad = gradient
        adam.step()
        if on_step is not None:
            on_step(step + 1, _state(adam, knobs))
    return model.stored(tensors)


def _state(adam: torch.optim.Adam, knobs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {f"{name} knob": knob.detach() for name, knob in knobs.items()}
    for name, knob in knobs.items():
        found |= {f"{name} {moment}": adam.state[knob][moment] for moment in _MOMENTS}
    return found


def _restore(
    adam: torch.optim.Adam, knobs: Mapping[str, Tensor], step: int, held: Mapping[str, Tensor]
) -> None:
    for name, knob in knobs.items():
        knob.data.copy_(held[f"{name} knob"])
        moments = {moment: held[f"{name} {moment}"].to(knob.device) for moment in _MOMENTS}
        adam.state[knob] = {"step": torch.tensor(float(step)), **moments}


def scratch_bytes(config: ModelConfig, device: torch.device) -> int:
    """Of what waits: weights as they are computed with on the device, states in float32."""
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    states = config.num_layers * ROWS_A_STEP * LENGTH * config.hidden_size
    return compute_type(device).itemsize * weights + 4 * states


def has_room(config: ModelConfig, device: torch.device) -> bool:
    """Whether that, and the values of a layer, fit into half of the memory that is free: as files
    they take none that somebody else needs, but each step wants to find them there."""
    values = LENGTH * (16 * config.hidden_size + 6 * config.intermediate_size)
    head = compute_type(device).itemsize * config.vocab_size * config.hidden_size
    wanted = scratch_bytes(config, device) + head + 4 * ROWS_A_STEP * values
    free = free_memory_bytes(device)
    return free is not None and wanted < free // 2


def _source_states(
    checkpoint: Checkpoint,
    config: ModelConfig,
    token_ids: Tensor,
    device: torch.device,
    crew: Workers,
) -> Tensor:
    """What the source's head gets, [rows, length, hidden] in the computing type."""
    states = embed_rows(checkpoint, config, token_ids)
    for layer in range(config.num_layers):
        source = read_layer(checkpoint, config, layer, device)
        for _ in Stream(source.block(config), source.products(), states, device, crew).steps():
            pass
    norm = read_tensor(checkpoint, FINAL_NORM)
    normed = crew.each(lambda row: rms_norm(states[row], norm, config.norm_eps), range(len(states)))
    return torch.stack([x.to(compute_type(device)) for x in normed])


def _put_aside(tensor: Tensor, path: Path) -> Kept:
    """A tensor of a GPU stays there; of others only the file's pages are in memory, while they are
    looked at."""
    if tensor.is_cuda:
        return lambda: tensor
    path.write_bytes(as_bytes(tensor))
    shape, dtype, size = tensor.shape, tensor.dtype, tensor.nbytes
    return lambda: MappedFile(path).view(0, size, dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """`weight` [out, in] as stored; `groups` int64 [in], the group of each feature."""

    weight: Kept
    groups: Tensor


@dataclass(slots=True)
class _Tuned:
    """The quantized model, with a knob for everything that is tuned: the logarithm of a factor.

    Knobs by name: a norm's is as long as the norm, a `q_scale_max`'s has one number for each group.
    """

    config: ModelConfig
    device: torch.device
    scratch: Path
    embed: Tensor
    source_head: Tensor
    norms: dict[str, Tensor] = field(default_factory=dict)
    matrices: dict[str, _Matrix] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    knobs: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        scratch: Path,
        device: torch.device,
    ) -> _Tuned:
        dtype = compute_type(device)
        head = read_tensor(checkpoint, EMBED if config.has_tied_embeddings else HEAD)
        model = cls(config, device, scratch, tensors[EMBED], head.to(device, dtype))
        knobs = model.knobs
        for name in tensors:
            if name.endswith("norm.weight"):
                model.norms[name] = as_factor(config, tensors[name]).to(device)
                knobs[name] = torch.zeros_like(model.norms[name])
            elif name.endswith(".q_scale_max"):
                stem = name.removesuffix(".q_scale_max")
                packed = exl2.check({p: tensors[f"{stem}.{p}"] for p in exl2.PARTS}, stem)
                sizes = torch.tensor([group.rows for group in packed.groups])
                of_row = torch.arange(len(sizes)).repeat_interleave(sizes)
                weight = exl2.dequantize(packed).T.to(device, dtype).contiguous()
                kept = _put_aside(weight, scratch / stem)
                model.matrices[stem] = _Matrix(kept, of_row[packed.q_invperm.long()].to(device))
                knobs[name] = torch.zeros(len(sizes), device=device)
            elif name.endswith(".bias"):
                model.biases[name.removesuffix(".bias")] = tensors[name].to(device, dtype)
        for knob in knobs.values():
            knob.requires_grad_()
        return model

    def divergence(self, token_ids: Tensor, wanted: Tensor, crew: Workers) -> float:
        """Mean over the tokens [R, T] of some rows, whose source states are `wanted`."""
        states, _ = self._up(token_ids, crew)
        return self._at_head(states, wanted, crew)[0]

    def gradients(self, token_ids: Tensor, wanted: Tensor, crew: Workers) -> dict[str, Tensor]:
        """Of that divergence, by every knob."""
        states, before = self._up(token_ids, crew)
        _, of_states, found = self._at_head(states, wanted, crew)
        for layer in reversed(range(self.config.num_layers)):
            of_states, of_knobs = self._down(layer, before.pop()(), of_states, crew)
            found |= of_knobs
        return found

    @torch.no_grad()
    def _up(self, token_ids: Tensor, crew: Workers) -> tuple[Tensor, list[Kept]]:
        """States after the last layer, float32 [R, T, hidden], and those before each."""
        x = self.embed[token_ids].float().to(self.device)
        if self.config.arch.embed_scale is EmbedScale.SQRT_HIDDEN:
            x = x * math.sqrt(self.config.hidden_size)
        before: list[Kept] = []
        for layer in range(self.config.num_layers):
            before.append(_put_aside(x, self.scratch / f"states-{layer}"))
            run = self._layer(layer)
            x = torch.cat(crew.each(run, _pieces(x, crew)))
        return x, before

    def _at_head(
        self, states: Tensor, wanted: Tensor, crew: Workers
    ) -> tuple[float, Tensor, dict[str, Tensor]]:
        """The divergence, its gradient by `states`, and by the last knobs."""
        names = [FINAL_NORM, f"{_HEAD}.q_scale_max"]
        head = self.matrices[_HEAD].weight()[: self.config.vocab_size]

        def run(piece: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
            x, theirs = piece[0].detach().requires_grad_(), piece[1].flatten(0, 1).to(self.device)
            norm = self.norms[FINAL_NORM] * self.knobs[FINAL_NORM].exp()
            inputs = self._scaled(_HEAD, rms_norm(x, norm, self.config.norm_eps)).to(head.dtype)
            loss, of_inputs = self._divergence(inputs.detach().flatten(0, 1), head, theirs, crew)
            return loss, self._gradients(inputs.flatten(0, 1), x, names, of_inputs)

        pieces = zip(_pieces(states, crew), _pieces(wanted, crew), strict=True)
        found = crew.each(run, pieces)
        of_states, of_knobs = _together([grads for _, grads in found], names)
        return sum(loss for loss, _ in found) / len(found), of_states, of_knobs

    def _down(
        self, layer: int, states: Tensor, of_states: Tensor, crew: Workers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """From the gradient by the states after the layer to that by those before it, and by its
        knobs."""
        names = [name for name in self.knobs if name.startswith(layer_prefix(layer))]
        layer_run = self._layer(layer)

        def run(piece: tuple[Tensor, Tensor]) -> list[Tensor]:
            x = piece[0].detach().requires_grad_()
            return self._gradients(layer_run(x), x, names, piece[1])

        pieces = zip(_pieces(states, crew), _pieces(of_states, crew), strict=True)
        return _together(crew.each(run, pieces), names)

    def _gradients(self, y: Tensor, x: Tensor, names: list[str], of_y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(y, [x, *(self.knobs[name] for name in names)], of_y))

    def _layer(self, layer: int) -> Callable[[Tensor], Tensor]:
        """The layer as a function, whose weights are in memory until it is forgotten."""
        prefix = layer_prefix(layer)
        weights = {part: self.matrices[prefix + part].weight() for part in MATRICES}

        def product(part: str, x: Tensor) -> Tensor:
            scaled = self._scaled(prefix + part, x).to(weights[part].dtype)
            return linear(scaled, weights[part], self.biases.get(prefix + part))

        def run(x: Tensor) -> Tensor:
            norms = {
                name.removeprefix(prefix).removesuffix(".weight"): norm * self.knobs[name].exp()
                for name, norm in self.norms.items()
                if name.startswith(prefix)
            }
            return Block(self.config, layer, norms).run(x, product)

        return run

    def _scaled(self, stem: str, x: Tensor) -> Tensor:
        """Inputs of a matrix times its groups' factors: as good as scaling its rows."""
        return x * self.knobs[f"{stem}.q_scale_max"].exp()[self.matrices[stem].groups]

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.final_softcap
        return logits.float() if cap is None else torch.tanh(logits.float() / cap) * cap

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that knobs belong to, with their factors in them."""
        found = {}
        for name, knob in self.knobs.items():
            factor = knob.detach().exp()
            if name in self.norms:
                found[name] = stored_norm(self.config, name, self.norms[name] * factor).cpu()
            else:
                found[name] = (tensors[name].float() * factor.cpu()).half()
        return found

    @torch.no_grad()
    def _divergence(
        self, x: Tensor, head: Tensor, wanted: Tensor, crew: Workers
    ) -> tuple[float, Tensor]:
        """Of inputs x [T, hidden] of the quantized head from `wanted` of the source's: the mean,
        and its gradient by x."""
        total, parts = 0.0, []
        for first in range(0, len(x), HEAD_ROWS):
            crew.check()
            rows = slice(first, first + HEAD_ROWS)
            ours = self._capped(linear(x[rows], head)).log_softmax(-1)
            theirs = self._capped(linear(wanted[rows], self.source_head)).log_softmax(-1)
            p = theirs.exp()
            total += float((p * (theirs - ours)).sum(dtype=torch.float64))
            gradient = ours.exp().sub_(p).div_(len(x))
            if self.config.final_softcap is not None:
                capped = self._capped(linear(x[rows], head))
                gradient *= 1 - (capped / self.config.final_softcap).square()
            parts.append(gradient.to(head.dtype) @ head)
        return total / len(x), torch.cat(parts)


def _pieces(x: Tensor, crew: Workers) -> tuple[Tensor, ...]:
    return torch.split(x, min(crew.rows_at_once, ROWS_A_STEP))


def _together(found: list[list[Tensor]], names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of pieces: by their states, one after the other, and by knobs, their means."""
    of_states, *of_knobs = zip(*found, strict=True)
    means = [torch.stack(one).mean(0) for one in of_knobs]
    return torch.cat(of_states), dict(zip(names, means, strict=True))
