"""Search for trellis codes by the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.checks import OpInputError
from exl_core.ops.rings import POSITIONS, REACH, new_bits
from exl_core.ops.weights import TRELLIS_RATES


class CpuRingOps:
    """RingOps of the CPU kernels."""

    _ops: exl_kernels.Table

    def nearest_rings(self, targets: Tensor, values: Tensor, rate: float) -> Tensor:
        if rate not in TRELLIS_RATES:
            raise OpInputError(f"nearest_rings: rate (got {rate})")
        states = torch.empty(targets.shape[0], POSITIONS, dtype=torch.int32)
        even, odd = new_bits(rate)[:2]
        self._ops.nearest_rings(targets, values, even, odd, REACH, states)
        return states
