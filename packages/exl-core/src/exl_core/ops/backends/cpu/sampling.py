"""Sampling with the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.sampling import (
    NextStep,
    RowSettings,
    Sampled,
    SampleSettings,
    SamplesInTurn,
)


class CpuSamplingOps(SamplesInTurn):
    """SamplingOps of the CPU kernels."""

    _ops: exl_kernels.Table

    def log_sum_exp(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], dtype=torch.float32)
        self._ops.log_sum_exp(x, out)
        return out

    def sample(self, logits: Tensor, settings: SampleSettings) -> Sampled:
        ids, factors, offsets = settings.edits or (None, None, None)
        return Sampled._make(
            self._ops.sample(
                logits,
                settings.mask,
                ids,
                factors,
                offsets,
                settings.temperature,
                settings.top_k,
                settings.top_p,
                settings.min_p,
                settings.uniform,
                settings.num_top,
            )
        )

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        sampled = [self.sample(logits[settings.row], settings) for settings in rows]
        if next_step is not None:
            next_step.launch_after(sampled)
        return sampled
