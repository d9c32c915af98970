"""The op table of the CPU kernels: allocates outputs and passes tensors to `exl_kernels`.

The kernels check their operands (exl_kernels.InputError is a ValueError) and release the GIL while
they run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.errors import BackendError
from exl_core.ops.backends.cpu.attention import CpuAttentionOps
from exl_core.ops.backends.cpu.elementwise import CpuElementwiseOps
from exl_core.ops.backends.cpu.latent import CpuLatentOps
from exl_core.ops.backends.cpu.library import exl_kernels, native_isas
from exl_core.ops.backends.cpu.linear import CpuLinearOps
from exl_core.ops.backends.cpu.moe import CpuMoeOps
from exl_core.ops.backends.cpu.recurrent import CpuRecurrentOps
from exl_core.ops.backends.cpu.rings import CpuRingOps
from exl_core.ops.backends.cpu.sampling import CpuSamplingOps


class CpuTable(
    CpuLinearOps,
    CpuAttentionOps,
    CpuLatentOps,
    CpuElementwiseOps,
    CpuMoeOps,
    CpuRecurrentOps,
    CpuSamplingOps,
    CpuRingOps,
):
    """OpTable of the CPU kernels for one instruction set, with their thread pool."""

    device = torch.device("cpu")
    before = None

    def __init__(self, isa: str | None, threads: int, *, batch_invariant: bool = False) -> None:
        isas = native_isas()
        if isa is not None and isa not in isas:
            raise BackendError(
                "this machine or build lacks the instruction set",
                expected=" or ".join(isas),
                got=isa,
            )
        self._ops = exl_kernels.Table(isa or isas[-1], threads)
        self._ops.is_batch_invariant = batch_invariant

    @property
    def name(self) -> str:
        return f"cpu-{self._ops.isa}"

    @property
    def threads(self) -> int:
        return self._ops.threads

    @property
    def is_batch_invariant(self) -> bool:
        return self._ops.is_batch_invariant

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
