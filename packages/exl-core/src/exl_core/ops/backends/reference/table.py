"""The reference op table: plain torch, computed in float64. Every kernel is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.ops.backends.reference.attention import ReferenceAttentionOps
from exl_core.ops.backends.reference.elementwise import ReferenceElementwiseOps
from exl_core.ops.backends.reference.latent import ReferenceLatentOps
from exl_core.ops.backends.reference.linear import ReferenceLinearOps
from exl_core.ops.backends.reference.moe import ReferenceMoeOps
from exl_core.ops.backends.reference.recurrent import ReferenceRecurrentOps
from exl_core.ops.backends.reference.sampling import ReferenceSamplingOps
from exl_core.ops.backends.rings import TorchRingOps


class ReferenceTable(
    ReferenceLinearOps,
    ReferenceAttentionOps,
    ReferenceLatentOps,
    ReferenceElementwiseOps,
    ReferenceMoeOps,
    ReferenceRecurrentOps,
    ReferenceSamplingOps,
    TorchRingOps,
):
    """Reference implementation of OpTable.

    `threads` is only stored: the number of torch's threads is a setting of the whole process.
    """

    name = "reference"
    device = torch.device("cpu")
    is_batch_invariant = False
    before = None

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @staticmethod
    def bring(tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def bring_all(tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def begin_pass(self) -> None:
        """Passes on this backend leave nothing behind that the next one could disturb."""

    def activations(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns)
