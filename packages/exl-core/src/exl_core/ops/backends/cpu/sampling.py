"""Sampling with the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.sampling import NextStep, RowSettings, Sampled


class CpuSamplingOps:
    """SamplingOps of the CPU kernels."""

    _ops: exl_kernels.Table

    def log_sum_exp(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], dtype=torch.float32)
        self._ops.log_sum_exp(x, out)
        return out

    def sample(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        ids: Tensor | None = None,
        values: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        uniform: float = 0.0,
        num_top: int = 0,
    ) -> Sampled:
        return Sampled._make(
            self._ops.sample(
                logits, mask, ids, values, temperature, top_k, top_p, min_p, uniform, num_top
            )
        )

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        drawn = [settings.draw(self.sample, logits[settings.row]) for settings in rows]
        if next_step is not None:
            next_step.launch_after(drawn)
        return drawn
