"""Interface through which the weights of a layer are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from exl_core.arch.layers import MLA
from exl_core.arch.modules import ModuleRow
from exl_core.ops.latent import LatentUp
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, JoinedExperts, PackedExperts


class WeightSource(Protocol):
    """Gives the weights of a layer, row by row of the module table; `Packer` is one."""

    @property
    def device(self) -> torch.device: ...

    def norm(self, row: ModuleRow) -> Tensor:
        """Factors of a norm, or a number, float32."""
        ...

    def norm_bias(self, row: ModuleRow) -> Tensor | None:
        """Bias of a norm, or None if it has none."""
        ...

    def packed(self, rows: Sequence[ModuleRow]) -> PackedLinear:
        """The matrix into which these matrices are packed."""
        ...

    def stack(self, experts: Sequence[PackedLinear]) -> PackedExperts:
        """The matrices of a layer's experts as one operand."""
        ...

    def join_experts(
        self,
        experts: ExpertMlp,
        gate_up: PackedLinear,
        down: PackedLinear,
        scores: PackedLinear | None,
    ) -> JoinedExperts | None:
        """The experts and a shared expert as one operand, if the op table joins them."""
        ...

    def latent_up(self, spec: MLA, rows: Sequence[ModuleRow]) -> LatentUp:
        """The matrices of latent attention from latent vectors to keys and values: one of both for
        each head in turn, or that of keys, transposed for each head, and that of values."""
        ...
