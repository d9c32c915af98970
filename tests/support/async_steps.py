"""Runner for the CPU that launches passes before their tokens are known, as with CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exl_core.engine.async_step import AsyncStep
from exl_core.engine.engine import Engine
from exl_core.model.runner import Runner
from exl_core.model.segment import Segment


class AsyncRunner(Runner):
    """`launched`: number of passes launched early.

    Each pass overwrites the logits of the previous one with NaN.
    """

    launched = 0
    has_graphs = True
    _next_ids: Tensor
    _logits: Tensor | None = None

    @torch.inference_mode()
    def run(self, *operands: Any, **rest: Any) -> Tensor:
        if self._logits is not None:
            self._logits.fill_(math.nan)
        self._logits = super().run(*operands, **rest)
        return self._logits

    def next_ids(self, segments: Sequence[Segment]) -> Tensor:
        self._next_ids = torch.zeros(len(segments), dtype=torch.int64)
        return self._next_ids

    def run_on(self, segments: Sequence[Segment]) -> Tensor:
        self.launched += 1
        ids = self._next_ids.tolist()
        return self.run(
            [replace(one, token_ids=(i,)) for one, i in zip(segments, ids, strict=True)]
        )


def enable_async_steps(engine: Engine) -> AsyncRunner:
    """Replace the engine's runner by one that launches passes early."""
    runner = AsyncRunner(engine.model, engine.store)
    engine._runner, engine._async_step = runner, AsyncStep(runner, engine.scheduler)
    return runner
