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
from exl_core.model.runner import NextPart, NextPass, Runner, divided
from exl_core.model.segment import Segment
from exl_core.ops.sampling import PartLogits


class AsyncRunner(Runner):
    """`launched`: number of passes, or of their parts, launched early.

    Each pass overwrites the logits of the previous one with NaN, unless passes have parts.
    """

    launched = 0
    num_parts = 1
    has_graphs = True
    _logits: Tensor | None = None

    @torch.inference_mode()
    def run(self, *operands: Any, **rest: Any) -> Tensor:
        if self._logits is not None:
            self._logits.fill_(math.nan)
        self._logits = super().run(*operands, **rest)
        return self._logits

    def next_pass(self, segments: Sequence[Segment]) -> NextPass:
        token_ids = torch.zeros(len(segments), dtype=torch.int64)
        if self.num_parts == 1:
            return NextPass(token_ids, [NextPart(segments, token_ids)])
        size = -(-len(segments) // self.num_parts)
        parts = [segments[i : i + size] for i in range(0, len(segments), size)]
        logits = torch.empty(len(segments), self.model.config.vocab_size)
        return NextPass(token_ids, divided(parts, token_ids, logits, [None] * len(parts)), logits)

    def run_on(self, part: NextPart) -> PartLogits:
        self.launched += 1
        ids = part.token_ids.tolist()
        segments = [replace(one, token_ids=(i,)) for one, i in zip(part.segments, ids, strict=True)]
        if part.logits is None:
            return PartLogits(self.run(segments))
        return PartLogits(part.logits.copy_(super().run(segments)), first_row=part.first_row)


def enable_async_steps(engine: Engine, num_parts: int = 1) -> AsyncRunner:
    """Replace the engine's runner by one that launches passes early, in up to `num_parts` parts."""
    runner = AsyncRunner(engine.model, engine.store)
    runner.num_parts = num_parts
    engine._runner, engine._async_step = runner, AsyncStep(runner, engine.scheduler)
    return runner
