"""The autograd backend: layer ops in plain torch, out of place, through which gradients flow.

It runs the functions of a model's layers on whole sequences: states are [R, T, hidden], R sequences
of T tokens from position 0 on. There is no cache. States are float32. Products may return a smaller
float type, and attention and gated activations then compute in that type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_core.ops.backends.autograd.attention import AutogradAttendOps
from exl_core.ops.backends.autograd.latent import AutogradLatentOps
from exl_core.ops.backends.autograd.linear import AutogradProductOps
from exl_core.ops.backends.autograd.moe import AutogradRoutedOps
from exl_core.ops.backends.autograd.recurrent import AutogradRecurrentOps

if TYPE_CHECKING:
    from exl_core.ops.table import LayerOps


class AutogradTable(
    AutogradProductOps,
    AutogradAttendOps,
    AutogradLatentOps,
    AutogradRoutedOps,
    AutogradRecurrentOps,
):
    """LayerOps whose results are new tensors: `out` is ignored, and nothing is overwritten."""

    @staticmethod
    def activations(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns)


AUTOGRAD = AutogradTable()

if TYPE_CHECKING:

    def _is_complete(table: AutogradTable) -> LayerOps:
        return table
