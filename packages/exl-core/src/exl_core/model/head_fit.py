"""Query and key heads in a form that few bits hold well, with the same scores.

Two things do not change what attention computes. A vector that is taken from every key of a head
shifts all scores of a query alike, which softmax does not see; and what divides an element of the
keys may multiply that element of the queries. Keys have large elements that hardly change from
token to token, so codes of four bits hold the rest much better. What is taken and divided by is
measured once for each model, on a fixed text: keys of any two requests agree, whoever came first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.model.observe import Observer, Part
from exl_core.model.weights import ModelWeights
from exl_core.ops.table import OpTable

_POWER = 0.25
"""Of spread of keys over size of queries. 1/2 would lose least if both were known exactly; they
come from a short text."""

_MOST = 8.0

FITTED_POSITIONS = 2048
"""The text's tokens are turned as if they lay evenly among so many: elements that turn slowly would
otherwise look as constant as those that do not turn at all."""


class HeadFit(NamedTuple):
    """After RoPE, query and key heads of a layer become x * scale + shift.

    Both float32 [(H + K) * D].
    """

    scale: Tensor
    shift: Tensor


def head_fit(queries: Tensor, keys: Tensor, *, is_shifted: bool) -> HeadFit:
    """Of a text's queries [n, H, D] and keys [n, K, D], after RoPE.

    Without `is_shifted` scores stay what they are, not only their differences.
    """
    _, kv_heads, d = keys.shape
    group = queries.shape[1] // kv_heads
    # The first token of a text is unlike all others: whatever has nowhere to look looks there.
    keys, queries = keys[1:].double(), queries[1:].double().view(-1, kv_heads, group, d)
    centre = keys.mean(0) if is_shifted else torch.zeros_like(keys[0])
    spread = (keys - centre).square().mean(0)  # [K, D]
    size = queries.square().mean((0, 2))  # [K, D]
    tiny = torch.finfo(torch.float32).tiny
    divisor = ((spread + tiny) / (size + tiny)).pow(_POWER / 2)
    divisor /= divisor.log().mean(-1, keepdim=True).exp()
    divisor.clamp_(1 / _MOST, _MOST)
    of_queries = divisor.repeat_interleave(group, dim=0)  # [H, D]
    scale = torch.cat([of_queries, 1 / divisor]).flatten().float()
    shift = torch.cat([torch.zeros_like(of_queries), -centre / divisor]).flatten().float()
    return HeadFit(scale, shift)


class HeadMeasure(Observer):
    """Fits the heads of every layer to the pass that it observes: one sequence from its start."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: OpTable,
        rotation: Callable[[int], tuple[Tensor, Tensor]],
    ) -> None:
        """`rotation`: of a layer, cos and sin to turn the pass's rows by."""
        self.fits: list[HeadFit] = []
        self._config = config
        self._weights = weights
        self._ops = ops
        self._rotation = rotation

    def before(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "attention" and part.layer is not None:
            self.fits.append(self._fit(part.layer, states))
        return states

    def _fit(self, layer: int, states: Tensor) -> HeadFit:
        config, ops, block = self._config, self._ops, self._weights.blocks[layer]
        attention = block.attention
        qkv = ops.norm_linear(states, block.attention_norm, config.norm_eps, attention.qkv)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        num_kv = config.num_kv_heads
        queries, keys = heads[:, : -2 * num_kv], heads[:, -2 * num_kv : -num_kv]
        for x, norm in ((queries, attention.q_norm), (keys, attention.k_norm)):
            if norm is not None:
                ops.rms_norm_heads_(x, norm, config.norm_eps)
            ops.rope_(x, *self._rotation(layer))
        return head_fit(queries, keys, is_shifted=not config.attention_softcap)
