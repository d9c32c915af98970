"""Tuning what the format leaves free, end to end, against the source's predictions.

Norms are stored in float16, and each group of a matrix has a float16 number that all its scales are
multiples of. A factor on each of them is found by gradient descent (Adam) on the divergence of the
quantized model's predictions from the source's, on the calibration rows. Codes stay as they are.
Needs the whole model in memory, as bfloat16, and one row's activations for each thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from exl_core.arch.key_map import EMBED, FINAL_NORM, HEAD, layer_prefix
from exl_core.arch.spec import EmbedScale, ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.codecs import exl2
from exl_core.convert.block import Block, rms_norm
from exl_core.convert.layers import (
    as_factor,
    compute_type,
    embed_rows,
    read_layer,
    read_tensor,
    stored_norm,
)
from exl_core.convert.parallel import Workers, workers
from exl_core.convert.plan import ConvertOptions
from exl_core.convert.stream import Stream
from exl_core.weights.checkpoint import Checkpoint

STEPS = 48
ROWS_A_STEP = 4
LENGTH = 512
RATE = 0.005
_HEAD_ROWS = 256  # of states whose logits exist at a time


def tune_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    token_ids: Tensor,
    *,
    options: ConvertOptions,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """New values for some of `tensors` (all of the output, by name), of unchanged shapes and types:
    norms and `q_scale_max`. For models that `has_room` has room for; none with `fast`."""
    device = torch.device(options.device)
    if options.fast:
        return {}
    length = min(LENGTH, token_ids.shape[1])
    token_ids = token_ids[:, : token_ids.shape[1] // length * length].reshape(-1, length)
    token_ids = token_ids[: STEPS * ROWS_A_STEP]
    with workers(device) as crew:
        with torch.no_grad():
            wanted = _source_states(checkpoint, config, token_ids, device, crew)
            model = _Tuned.of(checkpoint, config, tensors, device)
        order = torch.randperm(
            len(token_ids), generator=torch.Generator().manual_seed(options.seed)
        )
        knobs = list(model.knobs.values())
        adam = torch.optim.Adam(knobs, lr=RATE, betas=(0.9, 0.95))
        for step in range(STEPS):
            share = (step + 1) / STEPS
            adam.param_groups[0]["lr"] = (
                RATE * min(1.0, share * 8) * (1 + math.cos(math.pi * share)) / 2
            )
            rows = [int(order[(step * ROWS_A_STEP + i) % len(order)]) for i in range(ROWS_A_STEP)]
            pieces = torch.split(torch.tensor(rows), min(crew.rows_at_once, ROWS_A_STEP))
            found = crew.each(lambda some: model.gradients(token_ids[some], wanted[some]), pieces)
            for place, knob in enumerate(knobs):
                knob.grad = torch.stack([grads[place] for _, grads in found]).mean(0)
            adam.step()
            model.losses.append(sum(loss for loss, _ in found) / len(found))
            if on_step is not None:
                on_step(step + 1, STEPS)
    return model.stored(tensors)


def has_room(config: ModelConfig, device: torch.device) -> bool:
    """Whether weights in bfloat16 and some activations fit into half of what is free."""
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + 2 * config.vocab_size * config.hidden_size
    values = LENGTH * config.num_layers * (16 * config.hidden_size + 6 * config.intermediate_size)
    free = free_memory_bytes(device)
    return free is not None and 2 * weights + 4 * ROWS_A_STEP * values < free // 2


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


@dataclass(slots=True)
class _Matrix:
    """`weight` [out, in] as stored; `groups` int64 [in], the group of each feature."""

    weight: Tensor
    groups: Tensor


@dataclass(slots=True)
class _Tuned:
    """The quantized model, with a knob for everything that is tuned: the logarithm of a factor.

    Knobs by name: a norm's is as long as the norm, a `q_scale_max`'s has one number for each group.
    """

    config: ModelConfig
    device: torch.device
    embed: Tensor
    source_head: Tensor
    norms: dict[str, Tensor]
    matrices: dict[str, _Matrix]
    biases: dict[str, Tensor]
    knobs: dict[str, Tensor]
    losses: list[float]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> _Tuned:
        dtype = compute_type(device)
        norms, matrices, biases, knobs = {}, {}, {}, {}
        for name in tensors:
            if name.endswith("norm.weight"):
                norms[name] = as_factor(config, tensors[name]).to(device)
                knobs[name] = torch.zeros_like(norms[name])
            elif name.endswith(".q_scale_max"):
                stem = name.removesuffix(".q_scale_max")
                packed = exl2.check({p: tensors[f"{stem}.{p}"] for p in exl2.PARTS}, stem)
                sizes = torch.tensor([group.rows for group in packed.groups])
                of_row = torch.arange(len(sizes)).repeat_interleave(sizes)
                weight = exl2.dequantize(packed).T.to(device, dtype).contiguous()
                matrices[stem] = _Matrix(weight, of_row[packed.q_invperm.long()].to(device))
                knobs[name] = torch.zeros(len(sizes), device=device)
            elif name.endswith(".bias"):
                biases[name.removesuffix(".bias")] = tensors[name].to(device, dtype)
        head = read_tensor(checkpoint, EMBED if config.has_tied_embeddings else HEAD)
        for knob in knobs.values():
            knob.requires_grad_()
        embed = tensors[EMBED]
        return cls(
            config, device, embed, head.to(device, dtype), norms, matrices, biases, knobs, []
        )

    def gradients(self, token_ids: Tensor, wanted: Tensor) -> tuple[float, list[Tensor]]:
        """Mean divergence over the tokens [R, T] of some rows, and its gradient by every knob."""
        config = self.config
        with torch.enable_grad():
            x = self._states(token_ids)
            norm = self.norms[FINAL_NORM] * self.knobs[FINAL_NORM].exp()
            x = self._scaled("lm_head", rms_norm(x, norm, config.norm_eps)).flatten(0, 1)
            loss, of_x = self._divergence(x.detach(), wanted.flatten(0, 1).to(self.device))
            grads = torch.autograd.grad(x, list(self.knobs.values()), of_x)
        return loss, list(grads)

    def _states(self, token_ids: Tensor) -> Tensor:
        x = self.embed[token_ids].float().to(self.device)
        if self.config.arch.embed_scale is EmbedScale.SQRT_HIDDEN:
            x = x * math.sqrt(self.config.hidden_size)
        for layer in range(self.config.num_layers):
            prefix = layer_prefix(layer)
            norms = {
                name.removeprefix(prefix).removesuffix(".weight"): norm * self.knobs[name].exp()
                for name, norm in self.norms.items()
                if name.startswith(prefix)
            }

            def product(part: str, x: Tensor, prefix: str = prefix) -> Tensor:
                stem = prefix + part
                weight = self.matrices[stem].weight
                return linear(self._scaled(stem, x), weight, self.biases.get(stem))

            x = Block(self.config, layer, norms).run(x, product)
        return x

    def _scaled(self, stem: str, x: Tensor) -> Tensor:
        """Inputs of a matrix times its groups' factors: as good as scaling its rows."""
        matrix = self.matrices[stem]
        factors = self.knobs[f"{stem}.q_scale_max"].exp()[matrix.groups]
        return (x * factors).to(matrix.weight.dtype)

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

    def _divergence(self, x: Tensor, wanted: Tensor) -> tuple[float, Tensor]:
        """Of inputs x [T, hidden] of the quantized head from `wanted` of the source's: the mean,
        and its gradient by x."""
        head = self.matrices["lm_head"].weight[: self.config.vocab_size]
        total, parts = 0.0, []
        with torch.no_grad():
            for first in range(0, len(x), _HEAD_ROWS):
                rows = slice(first, first + _HEAD_ROWS)
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
