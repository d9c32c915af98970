"""Search for trellis codes on one GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.rings import TorchRingOps
from exl_core.ops.rings import POSITIONS, REACH, new_bits
from exl_kernels.cuda_trellis import NearestRings


class CudaRingOps:
    """RingOps of one GPU. Targets have contiguous rows, and the values are float16 numbers."""

    _gpu: Gpu

    def nearest_rings(self, targets: Tensor, values: Tensor, rate: float) -> Tensor:
        even, odd = new_bits(rate)[:2]
        size = self._gpu.size("nearest_rings_workspace", len(targets), even)
        if size == 0:  # the GPU lacks the shared memory for this rate
            return TorchRingOps.nearest_rings(targets, values, rate)
        states = self._gpu.empty(len(targets), POSITIONS, dtype=torch.int32)
        workspace = self._gpu.empty(size, dtype=torch.uint8)
        args = NearestRings(
            targets=targets.data_ptr(),
            target_stride=targets.stride(0),
            values=values.data_ptr(),
            states=states.data_ptr(),
            count=len(targets),
            even_bits=even,
            odd_bits=odd,
            reach=REACH,
            workspace=workspace.data_ptr(),
            workspace_bytes=size,
        )
        self._gpu.call("nearest_rings", args)
        return states
