"""A tiny GemMoE with random weights: transformers' Gemma with experts as Mixtral has them.

Its authors published the model with code of its own, which transformers does not have. The formulas
are those of Gemma, and of Mixtral with tanh-GELU in the experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import GemmaConfig, GemmaForCausalLM

from support.tiny_models import COMMON, randomized

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.w2(gelu(self.w1(x), approximate="tanh") * self.w3(x))
        return found


class SparseMoe(nn.Module):
    """Softmax over all experts, normalized over those chosen."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.top_k: int = config.num_experts_per_tok
        self.gate = nn.Linear(width, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(config.num_local_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = (weights * (chosen == number)).sum(-1, keepdim=True)
            total += own.to(x.dtype) * expert(x)
        return total


class Calls(nn.Module):
    """The module `called`, whose parameters belong to another one."""

    def __init__(self, called: nn.Module) -> None:
        super().__init__()
        self._called = (called,)  # a tuple, so that it is no child

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self._called[0](x)
        return found


class GemmoeForCausalLM(GemmaForCausalLM):
    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.block_sparse_moe = SparseMoe(config)
            layer.mlp = Calls(layer.block_sparse_moe)


def tiny_gemmoe(**changes: Any) -> GemmoeForCausalLM:
    return randomized(GemmoeForCausalLM(GemmaConfig(**{**COMMON, **EXPERTS, **changes})))
